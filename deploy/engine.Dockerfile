# The engine: vLLM's own server, started, warmed up and watched by `flywheel engine`.
#   CPU, anywhere:   docker build -f deploy/engine.Dockerfile .
#   NVIDIA GPU:      docker build -f deploy/engine.Dockerfile --build-arg FLAVOUR=gpu .
# The stages up to `cpu` are identical to those of trainer.Dockerfile, so that both images share the layers.
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

FROM base AS gpu
COPY requirements/gpu-engine.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/gpu-engine.txt

FROM ${FLAVOUR} AS engine
COPY shared shared
COPY trainer_service trainer_service
COPY services services
# a clone under umask 077 has files that only its owner can read
RUN chmod -R a+rX /app
USER flywheel
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/app
EXPOSE 8101
HEALTHCHECK --interval=5s --timeout=3s --start-period=300s --retries=12 \
  CMD ["python", "-c", \
    "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8101/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "services.cli"]
CMD ["engine", "-c", "/config/flywheel.yaml"]
