"""What is kept: records, streams, tables, weights. No torch, no Celery, no HTTP."""
