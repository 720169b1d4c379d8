# An image for machines without a GPU: `docker run --shm-size=2g rlhf_suite:cpu` runs the demo of task=ppo.
FROM python:3.11-slim

RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home suite && mkdir /suite && chown suite /suite
USER suite
WORKDIR /suite

COPY --chown=suite pyproject.toml constraints-cpu.txt noxfile.py README.md LICENSE run.py ./
COPY --chown=suite conf ./conf
COPY --chown=suite experiments ./experiments
COPY --chown=suite src ./src
RUN RLHF_SUITE_DEVICE=cpu python3 noxfile.py -s install

# A run saves its step when `docker stop` asks it to end; ten seconds may be too short for that.
STOPSIGNAL SIGTERM
ENTRYPOINT ["/suite/.venv/bin/python", "run.py"]
CMD ["task=ppo"]
