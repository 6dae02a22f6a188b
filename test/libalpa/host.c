/* A program that embeds libalpa, one test for each first argument. It prints what it finds. */
#define _GNU_SOURCE
#include <alpa.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 4
#define PIPELINE "alpa{cluster=cpu:1x2 num-layers=2 num-stages=2}"

static char *program;
static size_t program_size;

static void read_program(const char *path) {
  FILE *file = fopen(path, "rb");
  if (file == NULL || fseek(file, 0, SEEK_END) != 0) exit(2);
  program_size = (size_t)ftell(file);
  rewind(file);
  program = malloc(program_size);
  if (fread(program, 1, program_size, file) != program_size) exit(2);
  fclose(file);
}

/* Loads other files than the ones that the library was built with, by turns. */
static int initialize(int count, char **paths) {
  for (int number = 0; number + 1 < count; number += 2) {
    alpa_result result;
    const char *python = *paths[number] ? paths[number] : NULL;
    const char *libpython = *paths[number + 1] ? paths[number + 1] : NULL;
    alpa_status status = alpa_initialize(python, libpython, &result);
    printf("%d %s\n", status, alpa_result_error(result) ? alpa_result_error(result) : "");
    alpa_result_free(result);
  }
  return 0;
}

/* Plans by turns with runs that fail. The number of results that are not as in `wanted`. */
static void *work(void *wanted) {
  size_t wrong = 0;
  for (int number = 0; number < 6; ++number) {
    alpa_result result;
    if (number % 3 == 2) {
      const char *error = "pipeline:1:8: error: unknown option 'n' of 'alpa'";
      wrong += alpa_plan(program, program_size, "  alpa{n=1}", &result) != ALPA_PIPELINE_ERROR ||
               strncmp(alpa_result_error(result), error, strlen(error)) != 0;
    } else {
      wrong += alpa_plan(program, program_size, PIPELINE, &result) != ALPA_OK ||
               (wanted && strcmp(alpa_result_text(result, NULL), wanted) != 0);
    }
    if (wrong) fprintf(stderr, "%s\n", alpa_result_error(result));
    alpa_result_free(result);
  }
  return (void *)wrong;
}

/* The first call is made by several threads at once. */
static int threads(void) {
  pthread_t all[THREADS];
  size_t wrong = 0, same;
  alpa_result result;
  char *wanted = NULL;
  for (int round = 0; round < 2; ++round) {
    for (int number = 0; number < THREADS; ++number)
      if (pthread_create(&all[number], NULL, work, wanted) != 0) return 2;
    for (int number = 0; number < THREADS; ++number) {
      pthread_join(all[number], (void **)&same);
      wrong += same;
    }
    if (alpa_plan(program, program_size, PIPELINE, &result) != ALPA_OK) return 1;
    if (wanted == NULL) wanted = strdup(alpa_result_text(result, NULL));
    alpa_result_free(result);
  }
  printf("%zu wrong\n", wrong);
  free(wanted);
  return 0;
}

static long resident(void) {
  long size, pages = 0;
  FILE *file = fopen("/proc/self/statm", "r");
  if (file == NULL || fscanf(file, "%ld %ld", &size, &pages) != 2) exit(2);
  fclose(file);
  return pages * sysconf(_SC_PAGESIZE);
}

/* Prints by how many bytes memory grows in many calls, after a few. */
static int memory(const char *pipeline, int calls) {
  long before = 0;
  for (int number = -calls / 2; number < calls; ++number) {
    alpa_result result;
    if (number == 0) before = resident();
    alpa_run_passes(program, program_size, pipeline, &result);
    alpa_result_free(result);
  }
  printf("%ld\n", resident() - before);
  return 0;
}

/* Prints which settings of the process the library changes, and the status of its call. */
static int settings(void) {
  struct sigaction before[NSIG], after;
  alpa_result result;
  alpa_status status;
  for (int number = 1; number < NSIG; ++number) sigaction(number, NULL, &before[number]);
  status = alpa_plan(program, program_size, PIPELINE, &result);
  for (int number = 1; number < NSIG; ++number)
    if (sigaction(number, NULL, &after) == 0 && after.sa_handler != before[number].sa_handler)
      printf("signal %d\n", number);
  if (strcmp(setlocale(LC_ALL, NULL), "C") != 0) printf("locale\n");
  printf("%d\n", status);
  alpa_result_free(result);
  return 0;
}

int main(int argc, char **argv) {
  if (argc < 2) return 2;
  if (strcmp(argv[1], "initialize") == 0) return initialize(argc - 2, argv + 2);
  if (argc < 3) return 2;
  read_program(argv[2]);
  if (strcmp(argv[1], "threads") == 0) return threads();
  if (strcmp(argv[1], "settings") == 0) return settings();
  if (strcmp(argv[1], "memory") == 0 && argc == 5) return memory(argv[3], atoi(argv[4]));
  return 2;
}
