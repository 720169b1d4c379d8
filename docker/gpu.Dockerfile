# An image for NVIDIA GPUs: `docker run --gpus=all --ipc=host rlhf_suite:gpu task=ppo experiment=grpo ...`
# The compiler of CUDA is in it, because DeepSpeed and vLLM build some kernels when they are first used.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends g++ git python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home suite && mkdir /suite && chown suite /suite
USER suite
WORKDIR /suite

# No GPU is visible while an image is built, so the noxfile is told for which device to install.
COPY --chown=suite pyproject.toml constraints-gpu.txt noxfile.py README.md LICENSE run.py ./
COPY --chown=suite conf ./conf
COPY --chown=suite experiments ./experiments
COPY --chown=suite src ./src
RUN RLHF_SUITE_DEVICE=gpu python3 noxfile.py -s install

STOPSIGNAL SIGTERM
ENTRYPOINT ["/suite/.venv/bin/python", "run.py"]
CMD ["task=ppo"]
