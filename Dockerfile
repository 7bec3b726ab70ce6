# syntax=docker/dockerfile:1

FROM python:3.13-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY requirements.lock ./
COPY pyproject.toml README.md LICENSE ./
COPY proxy ./proxy
RUN pip wheel --no-deps --wheel-dir /dist .
# The environment has no pip of its own, and only wheels go in: nothing is compiled, so no compiler is needed anywhere.
RUN python -m venv --without-pip /opt/strata \
 && pip --python /opt/strata/bin/python install --only-binary :all: --constraint requirements.lock /dist/*.whl \
 && pip --python /opt/strata/bin/python check

FROM python:3.13-slim
LABEL org.opencontainers.image.title="strata-proxy" \
      org.opencontainers.image.description="An OpenAI-compatible reverse proxy that makes every prompt cheap to repeat" \
      org.opencontainers.image.licenses="MIT"
ENV PATH=/opt/strata/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    STRATA_HOST=0.0.0.0
COPY --from=build /opt/strata /opt/strata
# A number, so that Kubernetes can see by runAsNonRoot that it is not root.
USER 10001:10001
EXPOSE 8080
# ProxyHandler({}): an HTTP_PROXY meant for the upstream must not catch the check of this very container.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
  CMD ["python", "-I", "-c", "import os, urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:' + os.environ.get('STRATA_PORT', '8080') + '/livez', timeout=2)"]
ENTRYPOINT ["strata"]
CMD ["serve"]
