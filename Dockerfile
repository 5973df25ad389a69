# `docker build -t knn-moe .`, then `docker run --rm -v "$PWD:/data" knn-moe --help`.
# On a GPU, install a CUDA build of torch instead of the pinned one.
FROM python:3.11-slim AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
RUN useradd --create-home user
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheels /tmp/wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt /tmp/wheels/*.whl && rm -r /tmp/wheels
USER user
WORKDIR /data
ENTRYPOINT ["knn-moe"]
CMD ["--help"]
