# find_package(Alpa) for builds that plan programs. Alpa_DIR is the folder of the installed package:
#
#   cmake -DAlpa_DIR=$(python -c "import alpa; print(alpa.__path__[-1])") ...
#
#   find_package(Alpa REQUIRED)
#   alpa_opt(INPUT step.mlir OUTPUT planned.mlir PIPELINE "alpa{cluster=h100:1x8 num-layers=8}")
#   add_custom_target(plan ALL DEPENDS planned.mlir)
#
# Alpa_OPT is the alpa-opt to run. By default it is that of the package's environment.

cmake_minimum_required(VERSION 3.16)

find_program(
  Alpa_OPT alpa-opt
  HINTS "${CMAKE_CURRENT_LIST_DIR}/../../../../bin" "${CMAKE_CURRENT_LIST_DIR}/../../../Scripts"
  DOC "The alpa-opt that alpa_opt() runs")

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Alpa REQUIRED_VARS Alpa_OPT)

# alpa_opt(INPUT <file> OUTPUT <file> PIPELINE <pipeline> [FLAGS <flag>...] [DEPENDS <file>...])
#
# Runs the pipeline on INPUT at build time when INPUT or a file in DEPENDS (such as a cluster) has
# changed. INPUT is relative to the current source folder, OUTPUT to the current binary folder.
function(alpa_opt)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "INPUT;OUTPUT;PIPELINE" "FLAGS;DEPENDS")
  foreach(required INPUT OUTPUT PIPELINE)
    if(NOT arg_${required})
      message(FATAL_ERROR "alpa_opt: ${required} is missing")
    endif()
  endforeach()
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "alpa_opt: unknown arguments: ${arg_UNPARSED_ARGUMENTS}")
  endif()
  get_filename_component(input "${arg_INPUT}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_SOURCE_DIR}")
  get_filename_component(output "${arg_OUTPUT}" ABSOLUTE BASE_DIR "${CMAKE_CURRENT_BINARY_DIR}")
  add_custom_command(
    OUTPUT "${output}"
    COMMAND "${Alpa_OPT}" "${input}" "--pipeline=${arg_PIPELINE}" ${arg_FLAGS} -o "${output}"
    DEPENDS "${input}" ${arg_DEPENDS}
    WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}"
    COMMENT "Planning ${arg_OUTPUT}"
    VERBATIM)
endfunction()
