# The trainer: PyTorch and DeepSpeed.
#   CPU, anywhere:   docker build -f deploy/trainer.Dockerfile .
#   NVIDIA GPU:      docker build -f deploy/trainer.Dockerfile --build-arg FLAVOUR=gpu .
# The stages up to `cpu` are identical to those of engine.Dockerfile, so that both images share the layers.
ARG FLAVOUR=cpu

FROM python:3.11-slim-bookworm AS base
RUN useradd --system --uid 10001 --user-group --create-home flywheel \
    && install -d -m 0700 -o flywheel -g flywheel /data /data/versions /data/trainer /data/logs
WORKDIR /app
# vLLM and DeepSpeed compile small kernels at start, and vLLM's CPU build is linked against libnuma
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ libc6-dev libnuma1 python3-dev \
    && rm -rf /var/lib/apt/lists/*

FROM base AS cpu
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY requirements/torch.txt requirements/cpu.txt requirements/build.txt requirements/
RUN locked="pip install --no-cache-dir --no-deps --require-hashes" \
    && $locked -r requirements/build.txt \
    && ($locked -r requirements/torch.txt || $locked -r requirements/torch.txt --index-url "$TORCH_CPU_INDEX") \
    && $locked -r requirements/cpu.txt

FROM cpu AS trainer-cpu
COPY requirements/deepspeed.txt requirements/
RUN DS_BUILD_OPS=0 pip install --no-cache-dir --no-deps --require-hashes --no-build-isolation -r requirements/deepspeed.txt

FROM base AS trainer-gpu
COPY requirements/build.txt requirements/gpu-trainer.txt requirements/deepspeed.txt requirements/
RUN locked="pip install --no-cache-dir --no-deps --require-hashes" \
    && $locked -r requirements/build.txt && $locked -r requirements/gpu-trainer.txt \
    && DS_BUILD_OPS=0 $locked --no-build-isolation -r requirements/deepspeed.txt

FROM trainer-${FLAVOUR} AS trainer
COPY shared shared
COPY trainer_service trainer_service
# `export-model` checks its output with the explorer's code
COPY explorer_service explorer_service
COPY services services
# a clone under umask 077 has files that only its owner can read
RUN chmod -R a+rX /app
USER flywheel
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/app
RUN python -c "import trainer_service.backends.deepspeed, trainer_service.learner, trainer_service.loop"
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "services.cli"]
CMD ["trainer", "-c", "/config/flywheel.yaml"]
