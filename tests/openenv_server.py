"""A server of the protocol of OpenEnv, on a free port of this machine: guess a number, which is the label."""

from __future__ import annotations

import json
import threading

from websockets.sync.server import ServerConnection, serve


class Guessing:
    """The environment of one session. Its actions are {"message": <text>}."""

    secret = ""
    turns = 0

    def reset(self, label: str = "", **row) -> dict:
        self.secret, self.turns = label, 0
        return {"observation": {"text": f" Between 1 and 9, not {row}.", "turns": 0}, "reward": None, "done": False}

    def step(self, message: str) -> dict:
        if message == "break":
            raise RuntimeError("broken")
        self.turns += 1
        right = message == self.secret
        hint = "right" if right else "too low" if message < self.secret else "too high"
        return {"observation": {"text": hint, "turns": self.turns}, "reward": float(right), "done": right}


class OpenEnvServer:
    """Serves until it is closed; `sessions` has what every session sent. One that is full ends each session at once."""

    def __init__(self, is_full: bool = False) -> None:
        self.is_full = is_full
        self.sessions: list[list[dict]] = []
        self.server = serve(self.session, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{self.server.socket.getsockname()[1]}/ws"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def session(self, connection: ServerConnection) -> None:
        environment, seen = Guessing(), []
        self.sessions.append(seen)
        if self.is_full:
            connection.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
            return
        for line in connection:
            message = json.loads(line)
            seen.append(message)
            if message["type"] == "close":
                return
            connection.send(json.dumps(self.answer(environment, message)))

    def answer(self, environment: Guessing, message: dict) -> dict:
        data = message["data"]
        if message["type"] == "step" and set(data) != {"message"}:
            errors = [{"type": "missing", "loc": ["message"], "msg": "Field required"}]
            data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
            return {"type": "error", "data": data}
        try:
            return {"type": "observation", "data": getattr(environment, message["type"])(**data)}
        except RuntimeError as error:
            return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}

    def close(self) -> None:
        self.server.shutdown()
