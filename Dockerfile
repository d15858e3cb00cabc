# SPDX-License-Identifier: Apache-2.0
# A slim image with torchq's wheel and the example service; no compiler in it.
#   make wheel && docker build -t torchq-service . && docker run -p 8080:8080 torchq-service
FROM python:3.12-slim

# pip's default index has torch with CUDA libraries of some gigabytes. PyTorch's own index of CPU-only builds (see its
# "get started" page) goes here: --build-arg TORCH_INDEX=<address>
ARG TORCH_INDEX=
RUN pip install --no-cache-dir "torch>=2.13,<2.16" numpy ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}

COPY dist/*.whl /tmp/
RUN pip install --no-cache-dir /tmp/*_$(uname -m).whl && rm /tmp/*.whl

COPY examples/service/app.py examples/service/worker.py /srv/
RUN useradd --create-home app
USER app
WORKDIR /home/app
EXPOSE 8080
CMD ["python", "/srv/app.py", "--host", "0.0.0.0"]
