"""When learning happens and in what order: the Celery application, its tasks and the pipeline."""
