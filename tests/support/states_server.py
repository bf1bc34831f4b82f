"""A small server of hidden states, which answers and leaves files as vLLM with its connector does, of a target here."""

import fcntl
import os
import threading
import time
from contextlib import contextmanager, suppress

import torch
from safetensors.torch import save_file

from heads.frozen.hidden_states import read_states
from tests.support.fake_server import Api, serving

ONE_FORWARD = threading.Lock()  # servers of a test may share a model, and taps are read by hooks


class StatesApi(Api):
    """What the server says and writes; of the next files `file_troubles` says what happens to them: `lost` or `cut`."""

    def __init__(self, target, taps, folder):
        super().__init__(target)
        self.name, self.taps, self.folder = "states-" + "-".join(map(str, sorted(taps))), sorted(taps), folder
        self.file_troubles = []
        self.most_files = 0

    def complete(self, body):
        answer, ids = super().complete(body), body["prompt"]
        number = f"cmpl-{id(self)}-{time.monotonic_ns()}.safetensors"
        path = os.path.join(self.folder, number)
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)  # before the answer, as vLLM does
        if body.get("logprobs") and not body.get("echo"):
            answer["choices"][0]["logprobs"] = self.next_token(ids, body["logprobs"])
        with self.lock:
            trouble = self.file_troubles.pop(0) if self.file_troubles else None
        threading.Thread(target=self.write, args=(ids, path, lock, trouble), daemon=True).start()
        return answer | {"kv_transfer_params": {"hidden_states_path": f"/as/the/server/knows/it/{number}"}}

    def write(self, ids, path, lock, trouble):
        time.sleep(0.002)
        with suppress(FileNotFoundError):  # who asked may have gone, and the test's folder with it
            if trouble is None:
                with ONE_FORWARD:
                    states = read_states(self.model, torch.tensor([ids]), self.taps)
                found = torch.cat(states.taps_ABTE).transpose(0, 1).contiguous()
                save_file({"hidden_states": found, "token_ids": torch.tensor(ids)}, path)
                self.most_files = max(self.most_files, sum(name.endswith(".safetensors") for name in os.listdir(self.folder)))
            elif trouble == "cut":
                with open(path, "wb") as file:
                    file.write(b"\x10\0\0\0\0\0\0\0{")
        os.close(lock)

    @torch.no_grad()
    def next_token(self, ids, k):
        log_p_V = self.model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1)
        named = {f"token_id:{token}": float(log_p_V[token]) for token in log_p_V.topk(k).indices.tolist()}
        return {"tokens": list(named)[:1], "top_logprobs": [named]}


@contextmanager
def states_served(target, taps, folder):
    """Run a server of states while the block lasts."""
    with serving(StatesApi(target, taps, folder)) as served:
        yield served
