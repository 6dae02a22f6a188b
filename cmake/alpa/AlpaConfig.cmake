# find_package(Alpa) for builds that plan programs. Alpa_DIR is the folder of the installed package:
#
#   cmake -DAlpa_DIR=$(python -c "import alpa, os; print(os.path.dirname(alpa.__file__))") ...
#
#   find_package(Alpa REQUIRED)
#   alpa_opt(INPUT step.mlir OUTPUT planned.mlir PIPELINE "alpa{cluster=h100:1x8 num-layers=8}")
#   add_custom_target(plan ALL DEPENDS planned.mlir)
#
#   target_link_libraries(compiler PRIVATE alpa::alpa)  # libalpa/alpa.h
#
# Alpa_OPT is the alpa-opt to run. By default it is that of the package's environment.
# Alpa_PYTHON is the interpreter that alpa::alpa loads. By default it is the one beside alpa-opt.

cmake_minimum_required(VERSION 3.16)

find_program(
  Alpa_OPT alpa-opt
  HINTS "${CMAKE_CURRENT_LIST_DIR}/../../../../bin" "${CMAKE_CURRENT_LIST_DIR}/../../../Scripts"
  DOC "The alpa-opt that alpa_opt() runs")

if(Alpa_OPT)
  get_filename_component(_alpa_scripts "${Alpa_OPT}" DIRECTORY)
  find_program(
    Alpa_PYTHON NAMES python3 python
    HINTS "${_alpa_scripts}"
    DOC "The interpreter with the package Alpa that alpa::alpa loads")
  unset(_alpa_scripts)
endif()

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

# Adds alpa::alpa, which is built with the project, and loads Python when it is called. Without
# headers or a shared library of Python, there is a warning instead: alpa_opt() needs neither.
function(_alpa_add_library folder language)
  # Neither the current folder nor the user's PYTHONPATH counts here, as when libalpa runs.
  execute_process(
    COMMAND "${Alpa_PYTHON}" -P -E -m alpa.tools.libpython
    RESULT_VARIABLE status
    OUTPUT_VARIABLE found
    ERROR_VARIABLE error
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)
  if(NOT status EQUAL 0)
    message(
      WARNING "There is no target alpa::alpa. ${error}\n"
              "Alpa_PYTHON is ${Alpa_PYTHON}; set it to the interpreter that has Alpa.")
    return()
  endif()
  string(REPLACE "\n" ";" found "${found}")
  list(GET found 0 python)
  list(GET found 1 include)
  list(GET found 2 libpython)
  find_package(Threads REQUIRED)
  add_library(libalpa EXCLUDE_FROM_ALL "${folder}/alpa.c")
  add_library(alpa::alpa ALIAS libalpa)
  set_source_files_properties("${folder}/alpa.c" PROPERTIES LANGUAGE ${language})
  set_target_properties(
    libalpa PROPERTIES OUTPUT_NAME alpa C_STANDARD 99 CXX_STANDARD 11 C_VISIBILITY_PRESET hidden
                       CXX_VISIBILITY_PRESET hidden POSITION_INDEPENDENT_CODE ON)
  target_compile_definitions(
    libalpa PRIVATE "ALPA_PYTHON=\"${python}\"" "ALPA_LIBPYTHON=\"${libpython}\"")
  target_include_directories(libalpa SYSTEM PRIVATE "${include}")
  target_include_directories(libalpa PUBLIC "${folder}")
  target_link_libraries(libalpa PRIVATE ${CMAKE_THREAD_LIBS_INIT} ${CMAKE_DL_LIBS})
endfunction()

get_property(_alpa_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
if(NOT TARGET alpa::alpa)
  if("C" IN_LIST _alpa_languages)
    _alpa_add_library("${CMAKE_CURRENT_LIST_DIR}/libalpa" C)
  elseif("CXX" IN_LIST _alpa_languages)
    _alpa_add_library("${CMAKE_CURRENT_LIST_DIR}/libalpa" CXX)
  endif()
endif()
unset(_alpa_languages)
