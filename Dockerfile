# Two images, each from the stage of its name:
#   docker build --target cpu  -t tapegrad:cpu  .     builds only if the test-suite passes
#   docker build --target cuda -t tapegrad:cuda .     run it with: docker run --rm --gpus all tapegrad:cuda demo

FROM python:3.12.12-slim-bookworm AS base
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1
RUN useradd --create-home --uid 1000 tapegrad \
    && install --directory --owner=1000 --group=1000 /opt/venv /src
USER 1000
WORKDIR /src
RUN python -m venv /opt/venv \
    && pip install --no-cache-dir pip==26.3

FROM base AS cpu
COPY --chown=1000:1000 . .
RUN pip install --no-cache-dir --editable '.[test]' \
    && pytest -p no:cacheprovider
ENTRYPOINT ["tapegrad"]
CMD ["demo"]

FROM base AS wheel
COPY --chown=1000:1000 . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /src/dist .

# The CUDA libraries and headers come with the extra, the driver from the host through NVIDIA's container toolkit.
FROM base AS cuda
ENV CUPY_CACHE_DIR=/home/tapegrad/.cupy/kernel_cache \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all
# Bound, not copied: the wheel would stay in a layer of the image.
RUN --mount=type=bind,from=wheel,source=/src/dist,target=/dist \
    mkdir -p "$CUPY_CACHE_DIR" \
    && wheel="$(echo /dist/tapegrad-*.whl)" \
    && pip install --no-cache-dir "tapegrad[cuda12] @ file://$wheel"
WORKDIR /home/tapegrad
ENTRYPOINT ["tapegrad"]
CMD ["demo"]
