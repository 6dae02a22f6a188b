/* libalpa: loads libpython, and calls alpa.tools.libalpa. C99 and C++.
 *
 * It needs Python's headers, because the layout of PyConfig is that of one version: the older
 * Py_InitializeEx ends the process if the interpreter cannot start. It does not link with libpython,
 * so a program that has its own Python has no second one.
 *
 * ALPA_PYTHON and ALPA_LIBPYTHON are the files that `python -m alpa.tools.libpython` prints. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RTLD_DEFAULT */
#endif
#include <Python.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alpa.h"

#if !defined(ALPA_PYTHON) || !defined(ALPA_LIBPYTHON)
#error "define ALPA_PYTHON and ALPA_LIBPYTHON: python -m alpa.tools.libpython prints them"
#endif

#define PROTOCOL 1 /* as in alpa.tools.libalpa */
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define MINOR TEXT(PY_MAJOR_VERSION) "." TEXT(PY_MINOR_VERSION)
#define MESSAGE_SIZE 2048

#define PYTHON_FUNCTIONS(X)                                                      \
  X(const char *, Py_GetVersion, (void))                                         \
  X(int, Py_IsInitialized, (void))                                               \
  X(void, PyPreConfig_InitIsolatedConfig, (PyPreConfig *))                       \
  X(PyStatus, Py_PreInitialize, (const PyPreConfig *))                           \
  X(void, PyConfig_InitIsolatedConfig, (PyConfig *))                             \
  X(PyStatus, PyConfig_SetBytesString, (PyConfig *, wchar_t **, const char *))   \
  X(PyStatus, Py_InitializeFromConfig, (const PyConfig *))                       \
  X(void, PyConfig_Clear, (PyConfig *))                                          \
  X(int, PyStatus_Exception, (PyStatus))                                         \
  X(PyThreadState *, PyEval_SaveThread, (void))                                  \
  X(PyGILState_STATE, PyGILState_Ensure, (void))                                 \
  X(void, PyGILState_Release, (PyGILState_STATE))                                \
  X(PyObject *, PyImport_ImportModule, (const char *))                           \
  X(PyObject *, PyObject_GetAttrString, (PyObject *, const char *))              \
  X(PyObject *, PyObject_CallFunctionObjArgs, (PyObject *, ...))                 \
  X(int, PyObject_IsTrue, (PyObject *))                                          \
  X(long, PyLong_AsLong, (PyObject *))                                           \
  X(PyObject *, PyBytes_FromStringAndSize, (const char *, Py_ssize_t))           \
  X(int, PyBytes_AsStringAndSize, (PyObject *, char **, Py_ssize_t *))           \
  X(PyObject *, PyUnicode_FromString, (const char *))                            \
  X(PyObject *, PyUnicode_Join, (PyObject *, PyObject *))                        \
  X(PyObject *, PyUnicode_AsUTF8String, (PyObject *))                            \
  X(Py_ssize_t, PyTuple_Size, (PyObject *))                                      \
  X(PyObject *, PyTuple_GetItem, (PyObject *, Py_ssize_t))                       \
  X(void, PyErr_Fetch, (PyObject **, PyObject **, PyObject **))                  \
  X(void, PyErr_NormalizeException, (PyObject **, PyObject **, PyObject **))     \
  X(int, PyException_SetTraceback, (PyObject *, PyObject *))                     \
  X(void, PyErr_Clear, (void))                                                   \
  X(void, Py_DecRef, (PyObject *))

#define FIELD(type, name, parameters) type(*name) parameters;
static struct { PYTHON_FUNCTIONS(FIELD) } py; /* of the loaded libpython; set once */

/* Guards what follows. A thread that holds it never waits for the GIL of a host's Python, because
 * the thread that has the GIL may wait for the mutex. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static enum { NOT_LOADED, LOADED, BROKEN } state = NOT_LOADED;
static char broken[MESSAGE_SIZE]; /* why the interpreter cannot start */

struct bytes {
  char *data;
  size_t size;
};

struct alpa_result_data {
  alpa_status status;
  struct bytes error, text, bytecode, plan, table;
  alpa_diagnostic *diagnostics;
  size_t num_diagnostics;
};

/* A new result. NULL: no memory. */
static alpa_result new_result(alpa_status status) {
  alpa_result result = (alpa_result)calloc(1, sizeof *result);
  if (result != NULL) result->status = status;
  return result;
}

/* Copies bytes and adds a NUL byte. 0: no memory. */
static int copy(struct bytes *target, const char *data, size_t size) {
  target->data = (char *)malloc(size + 1);
  if (target->data == NULL) return 0;
  memcpy(target->data, data, size);
  target->data[size] = '\0';
  target->size = size;
  return 1;
}

/* The result of a failure with this message, after its context. NULL: no memory. */
static alpa_result failed(alpa_status status, const char *context, const char *message) {
  size_t before = strlen(context), size = before + strlen(message);
  alpa_result result = new_result(status);
  if (result == NULL) return NULL;
  if (size > before && message[size - before - 1] == '\n') --size;
  result->error.data = (char *)malloc(size + 1);
  if (result->error.data == NULL) {
    alpa_result_free(result);
    return NULL;
  }
  memcpy(result->error.data, context, before);
  memcpy(result->error.data + before, message, size - before);
  result->error.data[size] = '\0';
  result->error.size = size;
  return result;
}

/* Hands a result to the caller. */
static alpa_status give(alpa_result made, alpa_result *result) {
  *result = made;
  return alpa_result_status(made);
}

/* Finds the functions of this process's Python, or of libpython. 0: it cannot be loaded. */
static int load(const char *python, const char *libpython, char *message) {
  void *library = RTLD_DEFAULT;
  if (dlsym(RTLD_DEFAULT, "Py_IsInitialized") == NULL) {
    /* A wrong path would start Python without the environment's packages. */
    if (access(python, X_OK) != 0) {
      snprintf(message, MESSAGE_SIZE, "there is no interpreter: %s", python);
      return 0;
    }
    /* Python's extension modules look for its functions among the global ones. */
    library = dlopen(libpython, RTLD_NOW | RTLD_GLOBAL);
    if (library == NULL) {
      snprintf(message, MESSAGE_SIZE, "cannot load libpython: %s", dlerror());
      return 0;
    }
  }
#define FIND(type, name, parameters)                                                     \
  {                                                                                      \
    void *symbol = dlsym(library, #name);                                                \
    if (symbol == NULL) {                                                                \
      snprintf(message, MESSAGE_SIZE, "this Python has no " #name ": %s", libpython);    \
      if (library != RTLD_DEFAULT) dlclose(library);                                     \
      return 0;                                                                          \
    }                                                                                    \
    memcpy(&py.name, &symbol, sizeof symbol);                                            \
  }
  PYTHON_FUNCTIONS(FIND)
  if (!py.Py_IsInitialized() && strncmp(py.Py_GetVersion(), MINOR ".", sizeof MINOR) != 0) {
    snprintf(message, MESSAGE_SIZE, "libalpa is built for Python " MINOR ", and %s is %s",
             library == RTLD_DEFAULT ? "the Python of this process" : libpython,
             py.Py_GetVersion());
    if (library != RTLD_DEFAULT) dlclose(library);
    return 0;
  }
  return 1;
}

/* Starts the interpreter, and lets go of the GIL. */
static PyStatus start(const char *python) {
  PyPreConfig before;
  PyConfig config;
  PyStatus status;
  struct sigaction interrupt;
  py.PyPreConfig_InitIsolatedConfig(&before);
  before.utf8_mode = 1; /* The locale is the caller's. */
  status = py.Py_PreInitialize(&before);
  if (py.PyStatus_Exception(status)) return status;
  py.PyConfig_InitIsolatedConfig(&config); /* without signal handlers, variables, arguments */
  config.isolated = 0;                     /* it would leave out the user's packages */
  config.user_site_directory = 1;
  status = py.PyConfig_SetBytesString(&config, &config.program_name, python);
  if (!py.PyStatus_Exception(status)) status = py.Py_InitializeFromConfig(&config);
  py.PyConfig_Clear(&config);
  if (py.PyStatus_Exception(status)) return status;
  /* Python's module `signal` takes SIGINT when it is first imported, whatever the configuration. */
  sigaction(SIGINT, NULL, &interrupt);
  py.Py_DecRef(py.PyImport_ImportModule("signal"));
  py.PyErr_Clear();
  sigaction(SIGINT, &interrupt, NULL);
  py.PyEval_SaveThread();
  return status;
}

/* Loads and starts Python, unless it runs. 0: it cannot, for the reason in the message. */
static int ensure_python(const char *python, const char *libpython, char *message) {
  int done = 0;
  if (python == NULL) python = ALPA_PYTHON;
  if (libpython == NULL) libpython = ALPA_LIBPYTHON;
  pthread_mutex_lock(&mutex);
  if (state == NOT_LOADED && load(python, libpython, message)) {
    state = LOADED;
    if (!py.Py_IsInitialized()) {
      PyStatus status = start(python);
      if (py.PyStatus_Exception(status)) {
        state = BROKEN;
        snprintf(broken, MESSAGE_SIZE, "cannot start Python as %s: %s", python,
                 status.err_msg == NULL ? "it exits" : status.err_msg);
      }
    }
  }
  if (state == BROKEN) snprintf(message, MESSAGE_SIZE, "%s", broken);
  if (state == LOADED) {
    done = py.Py_IsInitialized();
    if (!done) snprintf(message, MESSAGE_SIZE, "the Python of this process has ended");
  }
  pthread_mutex_unlock(&mutex);
  return done;
}

/* The result of a failure by the exception that was raised, which a function of Python's `traceback`
 * writes, such as `format_exception`. Clears the exception. NULL: no memory. */
static alpa_result raised(alpa_status status, const char *context, const char *writer) {
  PyObject *type = NULL, *value = NULL, *trace = NULL;
  PyObject *module = NULL, *function = NULL, *lines = NULL, *empty = NULL, *text = NULL;
  PyObject *encoded = NULL;
  char *data = NULL;
  Py_ssize_t size = 0;
  alpa_result result;
  py.PyErr_Fetch(&type, &value, &trace);
  py.PyErr_NormalizeException(&type, &value, &trace);
  if (trace != NULL) py.PyException_SetTraceback(value, trace);
  if ((module = py.PyImport_ImportModule("traceback")) != NULL &&
      (function = py.PyObject_GetAttrString(module, writer)) != NULL &&
      (lines = py.PyObject_CallFunctionObjArgs(function, value, NULL)) != NULL &&
      (empty = py.PyUnicode_FromString("")) != NULL &&
      (text = py.PyUnicode_Join(empty, lines)) != NULL &&
      (encoded = py.PyUnicode_AsUTF8String(text)) != NULL &&
      py.PyBytes_AsStringAndSize(encoded, &data, &size) == 0) {
    result = failed(status, context, data);
  } else {
    py.PyErr_Clear();
    result = failed(status, context, "an exception of Python that cannot be written");
  }
  py.Py_DecRef(type), py.Py_DecRef(value), py.Py_DecRef(trace);
  py.Py_DecRef(module), py.Py_DecRef(function), py.Py_DecRef(lines);
  py.Py_DecRef(empty), py.Py_DecRef(text), py.Py_DecRef(encoded);
  return result;
}

/* Imports alpa.tools.libalpa. NULL: it cannot, and `failure` says why. */
static PyObject *import_package(alpa_result *failure) {
  PyObject *version, *module = py.PyImport_ImportModule("alpa.tools.libalpa");
  long protocol;
  if (module == NULL) {
    *failure = raised(ALPA_PYTHON_ERROR, "this process's Python cannot import Alpa: ",
                      "format_exception_only");
    return NULL;
  }
  version = py.PyObject_GetAttrString(module, "PROTOCOL");
  protocol = version == NULL ? -1 : py.PyLong_AsLong(version);
  py.Py_DecRef(version);
  py.PyErr_Clear();
  if (protocol == PROTOCOL) return module;
  py.Py_DecRef(module);
  *failure = failed(ALPA_PYTHON_ERROR, "",
                    "libalpa and the installed Alpa are of different versions: build libalpa again");
  return NULL;
}

/* Copies an item of a tuple that is bytes. 0: no memory, or an exception. */
static int take(PyObject *tuple, Py_ssize_t number, struct bytes *target) {
  char *data = NULL;
  Py_ssize_t size = 0;
  PyObject *item = py.PyTuple_GetItem(tuple, number);
  return item != NULL && py.PyBytes_AsStringAndSize(item, &data, &size) == 0 &&
         copy(target, data, (size_t)size);
}

/* As take; of None or empty bytes, nothing. */
static int take_optional(PyObject *tuple, Py_ssize_t number, struct bytes *target) {
  PyObject *item = py.PyTuple_GetItem(tuple, number);
  return item != NULL && (!py.PyObject_IsTrue(item) || take(tuple, number, target));
}

static int take_number(PyObject *tuple, Py_ssize_t number) {
  PyObject *item = py.PyTuple_GetItem(tuple, number);
  return item == NULL ? -1 : (int)py.PyLong_AsLong(item);
}

/* Copies the diagnostics of an answer. 0: no memory, or an exception. */
static int take_diagnostics(PyObject *tuple, alpa_result result) {
  Py_ssize_t number, count = tuple == NULL ? -1 : py.PyTuple_Size(tuple);
  if (count <= 0) return count == 0;
  result->diagnostics = (alpa_diagnostic *)calloc((size_t)count, sizeof *result->diagnostics);
  if (result->diagnostics == NULL) return 0;
  for (number = 0; number < count; ++number) {
    struct bytes file = {NULL, 0}, message = {NULL, 0};
    PyObject *one = py.PyTuple_GetItem(tuple, number);
    alpa_diagnostic *target = &result->diagnostics[number];
    int taken = one != NULL && take(one, 1, &file) && take(one, 4, &message);
    target->file = file.data;
    target->message = message.data;
    result->num_diagnostics = (size_t)number + 1;
    if (!taken) return 0;
    target->severity = (alpa_severity)take_number(one, 0);
    target->line = take_number(one, 2);
    target->column = take_number(one, 3);
  }
  return 1;
}

/* Copies an answer of alpa.tools.libalpa. NULL: no memory. */
static alpa_result unpacked(PyObject *answer) {
  alpa_result result = new_result(ALPA_OK);
  if (result == NULL) return NULL;
  result->status = (alpa_status)take_number(answer, 0);
  if (take_optional(answer, 1, &result->error) &&
      take_diagnostics(py.PyTuple_GetItem(answer, 2), result) &&
      take_optional(answer, 3, &result->text) && take_optional(answer, 4, &result->bytecode) &&
      take_optional(answer, 5, &result->plan) && take_optional(answer, 6, &result->table))
    return result;
  alpa_result_free(result);
  py.PyErr_Clear();
  return NULL;
}

/* Calls a function of alpa.tools.libalpa. */
static alpa_status call(const char *name, const void *module, size_t size, const char *pipeline,
                        alpa_result *result) {
  PyObject *package, *function, *source, *passes, *answer = NULL;
  alpa_result made = NULL;
  char message[MESSAGE_SIZE];
  PyGILState_STATE gil;
  if (result == NULL) return ALPA_ARGUMENT_ERROR;
  if (module == NULL || pipeline == NULL)
    return give(
        failed(ALPA_ARGUMENT_ERROR, module == NULL ? "module" : "pipeline", " is NULL"), result);
  if (!ensure_python(NULL, NULL, message))
    return give(failed(ALPA_PYTHON_ERROR, "", message), result);
  gil = py.PyGILState_Ensure();
  package = import_package(&made);
  if (package != NULL) {
    function = py.PyObject_GetAttrString(package, name);
    source = py.PyBytes_FromStringAndSize((const char *)module, (Py_ssize_t)size);
    passes = py.PyBytes_FromStringAndSize(pipeline, (Py_ssize_t)strlen(pipeline));
    if (function != NULL && source != NULL && passes != NULL)
      answer = py.PyObject_CallFunctionObjArgs(function, source, passes, NULL);
    made = answer == NULL ? raised(ALPA_INTERNAL_ERROR, "", "format_exception")
                          : unpacked(answer);
    py.Py_DecRef(package), py.Py_DecRef(function), py.Py_DecRef(source);
    py.Py_DecRef(passes), py.Py_DecRef(answer);
  }
  py.PyGILState_Release(gil);
  return give(made, result);
}

int alpa_abi_version(void) { return ALPA_ABI_VERSION; }

alpa_status alpa_initialize(const char *python, const char *libpython, alpa_result *result) {
  PyObject *package;
  alpa_result made = NULL;
  char message[MESSAGE_SIZE];
  PyGILState_STATE gil;
  if (result == NULL) return ALPA_ARGUMENT_ERROR;
  if (!ensure_python(python, libpython, message))
    return give(failed(ALPA_PYTHON_ERROR, "", message), result);
  gil = py.PyGILState_Ensure();
  package = import_package(&made);
  if (package != NULL) made = new_result(ALPA_OK);
  py.Py_DecRef(package);
  py.PyGILState_Release(gil);
  return give(made, result);
}

alpa_status alpa_run_passes(const void *module, size_t size, const char *pipeline,
                            alpa_result *result) {
  return call("run_passes", module, size, pipeline, result);
}

alpa_status alpa_plan(const void *module, size_t size, const char *pipeline, alpa_result *result) {
  return call("plan", module, size, pipeline, result);
}

alpa_status alpa_result_status(alpa_result result) {
  return result == NULL ? ALPA_OUT_OF_MEMORY : result->status;
}

const char *alpa_result_error(alpa_result result) {
  return result == NULL ? "out of memory" : result->error.data;
}

size_t alpa_result_num_diagnostics(alpa_result result) {
  return result == NULL ? 0 : result->num_diagnostics;
}

const alpa_diagnostic *alpa_result_diagnostic(alpa_result result, size_t number) {
  return number < alpa_result_num_diagnostics(result) ? &result->diagnostics[number] : NULL;
}

static const char *sized(const struct bytes *bytes, size_t *size) {
  if (size != NULL) *size = bytes == NULL ? 0 : bytes->size;
  return bytes == NULL ? NULL : bytes->data;
}

const char *alpa_result_text(alpa_result result, size_t *size) {
  return sized(result == NULL ? NULL : &result->text, size);
}

const void *alpa_result_bytecode(alpa_result result, size_t *size) {
  return sized(result == NULL ? NULL : &result->bytecode, size);
}

const char *alpa_result_plan(alpa_result result) {
  return result == NULL ? NULL : result->plan.data;
}

const char *alpa_result_table(alpa_result result) {
  return result == NULL ? NULL : result->table.data;
}

void alpa_result_free(alpa_result result) {
  size_t number;
  if (result == NULL) return;
  for (number = 0; number < result->num_diagnostics; ++number) {
    free((char *)result->diagnostics[number].file);
    free((char *)result->diagnostics[number].message);
  }
  free(result->diagnostics);
  free(result->error.data);
  free(result->text.data);
  free(result->bytecode.data);
  free(result->plan.data);
  free(result->table.data);
  free(result);
}
