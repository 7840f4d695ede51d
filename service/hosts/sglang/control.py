"""SGLang's control routes, by HTTP. Each answers with `success`; one that does not is an `EngineTrouble`."""

from typing import Any

import httpx2

from service.hosts.loopback import EngineTrouble, loopback
from service.hosts.sglang_plugin.loader import LOADER

NO_TENSORS = "gARdlC4="  # an empty list as SGLang wants its tensors, a pickle in base64: the pointer says what to load
TARGET, DRAFT = "target", "draft"


class Control:
    """One SGLang. `selector` is always named: its own default would open the target too."""

    def __init__(self, url: str, seconds: float, key: str = "") -> None:
        host, port = loopback(url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx2.Client(
            base_url=f"http://{host}:{port}", timeout=seconds, headers=headers, trust_env=False
        )

    def close(self) -> None:
        self._client.close()

    def ranks(self) -> int:
        """How many processes share the model: each gets a payload of its own."""
        return int(self._asked("GET", "/server_info").get("tp_size", 1))

    def checksum(self, selector: str) -> list[str]:
        """Of the weights of the target or of the draft, one for each rank."""
        said = self._asked("POST", "/weights_checker", {"action": "checksum", "selector": selector})
        return [str(rank["per_gpu_checksum"]) for rank in said.get("ranks") or []]

    def pause(self) -> None:
        """No step is under way afterwards; running requests go back to the queue and are computed again."""
        self._asked("POST", "/pause_generation", {"mode": "retract"})

    def resume(self) -> None:
        self._asked("POST", "/continue_generation", {})

    def begin(self) -> None:
        self._asked("POST", "/begin_weight_update", {"selector": DRAFT})

    def load(self, ranks: int, label: str) -> None:
        """Let each rank load what the pointer names."""
        body = {
            "serialized_named_tensors": [NO_TENSORS] * ranks,
            "load_format": LOADER,
            "selector": DRAFT,
            "flush_cache": False,
            "weight_version": label,
        }
        self._asked("POST", "/update_weights_from_tensor", body)

    def end(self) -> None:
        self._asked("POST", "/end_weight_update", {})

    def flush(self) -> None:
        """Forget the keys and values of the drafter before; only while paused, as nothing may run."""
        self._send("POST", "/flush_cache", None)

    def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            said: dict[str, Any] = self._send(method, path, body).json()
        except ValueError as error:
            raise EngineTrouble(f"{path} answered with something else than JSON") from error
        if said.get("success") is False:
            raise EngineTrouble(f"{path}: {said.get('message', 'refused')}")
        return said

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx2.Response:
        try:
            answer = self._client.request(method, path, json=body)
        except httpx2.HTTPError as error:
            raise EngineTrouble(f"{path}: no answer ({type(error).__name__})") from error
        if answer.status_code != httpx2.codes.OK:
            raise EngineTrouble(f"{path} answered {answer.status_code}: {answer.text[:200]}")
        return answer
