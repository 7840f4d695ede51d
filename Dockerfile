# One image for every process: migrate, serve, trainer, housekeeper and beat differ by their command only.
FROM python:3.11-slim

# The pinned torch of the default index brings CUDA. For a smaller image on machines without a GPU, name an
# index of CPU builds: docker compose build --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL

ENV PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    PYTHONPATH=/app \
    REDRAFT_HOME=/var/lib/redraft \
    REDRAFT_CACHE=/var/cache/redraft \
    HF_HOME=/var/cache/redraft/huggingface

# A volume takes over the owner of the folder that it is first laid on: both must be the user's own.
RUN useradd --uid 10001 --create-home redraft \
    && install -d -o redraft -g redraft -m 0700 "$REDRAFT_HOME" "$REDRAFT_CACHE"

WORKDIR /app

# The dependencies first, in a layer that only the pins change. PYTHONPATH finds the packages that follow.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN pip install -c constraints.txt hatchling editables \
    && pip install --no-build-isolation -c constraints.txt -e .

COPY . .
USER redraft
VOLUME ["/var/lib/redraft", "/var/cache/redraft"]
CMD ["redraft", "serve"]
