/* The C interface of Alpa: runs passes on StableHLO programs and plans them.
 *
 *     alpa_result result;
 *     if (alpa_plan(text, size, "alpa{cluster=cpu:2x4 num-stages=2}", &result) == ALPA_OK)
 *       puts(alpa_result_table(result));
 *     else
 *       fputs(alpa_result_error(result), stderr);
 *     alpa_result_free(result);
 *
 * Alpa is written in Python. The first call loads libpython and the installed package into this
 * process, which takes a second. Python stays there until the process ends. If the process already
 * runs Python, that interpreter is used, and must be able to import the package.
 *
 * Threads: every function may be called from every thread, several at a time, with or without the
 * GIL. Calls take turns where they run Python. A result may be read by several threads.
 *
 * Texts are UTF-8, whatever the locale, and end with a NUL byte.
 *
 * The process: no function prints to standard output, exits, or changes the locale or a signal's
 * action. Python's environment variables (PYTHONPATH and others) have no effect if the interpreter
 * is started here. Large programs are solved in child processes; the option `processes=0` of
 * `alpa` prevents them. MLIR trusts programs: broken bytecode can crash the process. */
#ifndef ALPA_H
#define ALPA_H

#include <stddef.h>

#if defined(__GNUC__)
#define ALPA_API __attribute__((visibility("default")))
#else
#define ALPA_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header. It grows when a program must be compiled again. */
#define ALPA_ABI_VERSION 1

/* The version of the library, to compare with ALPA_ABI_VERSION. */
ALPA_API int alpa_abi_version(void);

/* How a call ended. */
typedef enum alpa_status {
  ALPA_OK = 0,
  ALPA_ARGUMENT_ERROR = 1, /* an argument is NULL */
  ALPA_PYTHON_ERROR = 2,   /* the interpreter or the package cannot be loaded */
  ALPA_PIPELINE_ERROR = 3, /* the pipeline's text is wrong */
  ALPA_PROGRAM_ERROR = 4,  /* the program cannot be read, or a pass refuses it */
  ALPA_INTERRUPTED = 5,    /* Ctrl-C, in a process whose own Python handles it */
  ALPA_INTERNAL_ERROR = 6, /* a bug; the error is Python's traceback */
  ALPA_OUT_OF_MEMORY = 7   /* there is no result: it is NULL */
} alpa_status;

typedef enum alpa_severity {
  ALPA_ERROR = 0,
  ALPA_WARNING = 1,
  ALPA_REMARK = 2,
  ALPA_NOTE = 3 /* belongs to the diagnostic before it */
} alpa_severity;

/* What was said of a place. `file` is the file that the program's locations name; `module`, if they
 * name none, for a place in the program's text; or `pipeline`, for one in the pipeline's. Lines and
 * columns count from 1, and are 0 where there is no place. */
typedef struct alpa_diagnostic {
  alpa_severity severity;
  const char *file;
  int line;
  int column;
  const char *message;
} alpa_diagnostic;

/* The result of a call. The caller owns it, and all that its functions return lives as long. */
typedef struct alpa_result_data *alpa_result;

/* Loads the interpreter and the package now, not at the first call, or loads others than those that
 * the library was built with. Later calls do not change what is loaded. After ALPA_PYTHON_ERROR, a
 * call may name other files, unless the interpreter has failed to start.
 *
 * python     the interpreter of the environment with the package, such as /venv/bin/python3;
 *            NULL: the one that the library was built with
 * libpython  its shared library, the last line that `python3 -m alpa.tools.libpython` prints;
 *            NULL: the one that the library was built with
 * result     receives the result, also of a failure */
ALPA_API alpa_status alpa_initialize(const char *python, const char *libpython,
                                     alpa_result *result);

/* Runs a pipeline on a program.
 *
 * module    the program, MLIR text or bytecode; the caller keeps it
 * size      its number of bytes
 * pipeline  the passes, Alpa's and MLIR's, as `alpa-opt --pipeline` takes them
 * result    receives the result, also of a failure */
ALPA_API alpa_status alpa_run_passes(const void *module, size_t size, const char *pipeline,
                                     alpa_result *result);

/* As alpa_run_passes, with a pipeline that leaves a plan, such as `alpa{cluster=cpu:2x4}`. The
 * result also has the plan's numbers and table. */
ALPA_API alpa_status alpa_plan(const void *module, size_t size, const char *pipeline,
                               alpa_result *result);

/* What the call returned. The functions below take NULL for a result that could not be made. */
ALPA_API alpa_status alpa_result_status(alpa_result result);

/* The errors and their notes, a line each: `file:line:column: error: message`. NULL after success. */
ALPA_API const char *alpa_result_error(alpa_result result);

/* Everything that was said, remarks and warnings too, in order. NULL from alpa_result_diagnostic if
 * there are not so many. */
ALPA_API size_t alpa_result_num_diagnostics(alpa_result result);
ALPA_API const alpa_diagnostic *alpa_result_diagnostic(alpa_result result, size_t number);

/* The module after the passes, as text, and as bytecode with locations. `size`, unless it is NULL,
 * receives the number of bytes, without the NUL byte. NULL after a failure. */
ALPA_API const char *alpa_result_text(alpa_result result, size_t *size);
ALPA_API const void *alpa_result_bytecode(alpa_result result, size_t *size);

/* The plan's numbers: the text of PLAN.json, described by `passes/plan/plan.schema.json` in the
 * package. NULL if alpa_plan has not made the result, and after a failure. */
ALPA_API const char *alpa_result_plan(alpa_result result);

/* The plan as a table for people: its stages, what limits it, what is sent. NULL as above. */
ALPA_API const char *alpa_result_table(alpa_result result);

/* Frees a result; NULL is allowed. */
ALPA_API void alpa_result_free(alpa_result result);

#ifdef __cplusplus
}
#endif

#endif
