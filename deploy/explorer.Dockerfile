# The explorer: no torch, no vLLM. Build from the repository's root: docker build -f deploy/explorer.Dockerfile .
FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --user-group --create-home flywheel \
    && install -d -m 0700 -o flywheel -g flywheel /data /data/versions
WORKDIR /app
COPY requirements/explorer.txt requirements/
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements/explorer.txt
COPY shared shared
COPY explorer_service explorer_service
COPY services services
# a clone under umask 077 has files that only its owner can read
RUN chmod -R a+rX /app
USER flywheel
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=/app
EXPOSE 8010
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s --retries=6 \
  CMD ["python", "-c", \
    "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8010/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["python", "-m", "services.cli"]
CMD ["explorer", "-c", "/config/flywheel.yaml"]
