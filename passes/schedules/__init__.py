"""Pipeline schedules as data: lists of work, their checks, one simulator, and generators."""
