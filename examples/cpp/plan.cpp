// Plans a program and prints its stages:
//
//   plan step.mlir "alpa{cluster=cpu:1x2 num-layers=2 num-stages=2}" [planned.mlir]
#include <alpa.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <string>
#include <type_traits>

namespace {

struct Free {
  void operator()(alpa_result result) const { alpa_result_free(result); }
};
using Result = std::unique_ptr<std::remove_pointer_t<alpa_result>, Free>;

Result plan(const std::string &program, const std::string &pipeline) {
  alpa_result result = nullptr;
  alpa_plan(program.data(), program.size(), pipeline.c_str(), &result);
  return Result(result);
}

}  // namespace

int main(int argc, char **argv) {
  if (argc < 3 || argc > 4) {
    std::cerr << "usage: plan PROGRAM PIPELINE [PLANNED]\n";
    return 1;
  }
  if (alpa_abi_version() != ALPA_ABI_VERSION) {
    std::cerr << "this program was compiled for another version of libalpa\n";
    return 1;
  }
  std::ifstream file(argv[1], std::ios::binary);
  if (!file) {
    std::cerr << argv[1] << ": cannot be read\n";
    return 1;
  }
  const std::string program{std::istreambuf_iterator<char>(file), {}};

  const Result result = plan(program, argv[2]);
  if (alpa_result_status(result.get()) != ALPA_OK) {
    std::cerr << alpa_result_error(result.get()) << '\n';
    return 1;
  }
  for (size_t i = 0; i < alpa_result_num_diagnostics(result.get()); ++i) {
    const alpa_diagnostic &said = *alpa_result_diagnostic(result.get(), i);
    std::cerr << said.file << ':' << said.line << ':' << said.column << ": " << said.message << '\n';
  }
  std::cout << alpa_result_table(result.get());
  if (argc == 4) {
    size_t size = 0;
    const char *text = alpa_result_text(result.get(), &size);
    if (!std::ofstream(argv[3], std::ios::binary).write(text, size)) {
      std::cerr << argv[3] << ": cannot be written\n";
      return 1;
    }
  }
  return 0;
}
