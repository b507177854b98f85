"""What another user of a machine, or another pod on a node or network, may do: what lies about, and what listens."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch.distributed

from baton import scratch
from baton.checkpoint.staging import Staging
from baton.store.cache import NodeCache
from baton.train import distributed


def mode(path: str | os.PathLike[str]) -> int:
    """The rights on a file or folder."""
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def lax() -> Iterator[None]:
    """A process whose own files everybody may write to."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("lax")
def test_what_a_process_keeps_beside_it_is_its_users_alone(tmp_path: Path) -> None:
    """Downloads, and checkpoints on their way (in shared memory, too)."""
    with scratch.scratch_folder("threat") as folder, scratch.scratch_folder("threat") as other:
        assert mode(folder) == 0o700
        assert os.path.basename(folder).rpartition("-")[2] != os.path.basename(other).rpartition("-")[2]
    with Staging() as staging:
        assert mode(staging.folder(1)) == 0o700
    os.mkdir(tmp_path / "plain")
    assert mode(tmp_path / "plain") == 0o777


SERVER = """
import json, os, stat, sys
from multiprocessing import forkserver
from baton.local import forkserver as warm
warm._PRELOADED = ()  # nothing that takes time
os.umask(0)
warm.start()
address = forkserver._forkserver._forkserver_address
mode = lambda path: stat.S_IMODE(os.stat(path).st_mode)
print(json.dumps([address, mode(address), mode(os.path.dirname(address)), stat.S_ISSOCK(os.stat(address).st_mode)]))
"""


def test_the_server_that_stages_are_forked_from_listens_to_its_user_alone() -> None:
    """A file in a folder of its own; an abstract socket would have no rights (CVE-2022-42919)."""
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, check=True)
    address, of_socket, of_folder, is_socket = json.loads(done.stdout)
    assert address.startswith("/")
    assert is_socket
    assert (of_socket, of_folder) == (0o600, 0o700)


def test_a_cache_of_a_node_hands_out_what_has_its_hash(tmp_path: Path) -> None:
    cache, digest = NodeCache(str(tmp_path / "cache"), 1e6), hashlib.sha256(b"weights").hexdigest()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / digest).write_bytes(b"planted")
    assert not cache.take(digest, str(tmp_path / "pod" / "weights"))
    assert not (tmp_path / "cache" / digest).exists(), "and takes away what has not"


def test_who_may_write_to_a_cache_may_write_to_what_was_taken_from_it(tmp_path: Path) -> None:
    """What is not prevented: the file is a link, so that no memory is spent on it. A cache is for one team."""
    cache, digest = NodeCache(str(tmp_path / "cache"), 1e6), hashlib.sha256(b"weights").hexdigest()
    (tmp_path / "weights").write_bytes(b"weights")
    cache.keep(digest, str(tmp_path / "weights"))
    taken = tmp_path / "pod" / "weights"
    assert cache.take(digest, str(taken))
    (tmp_path / "cache" / digest).write_bytes(b"planted")
    assert taken.read_bytes() == b"planted"


def test_processes_of_one_machine_meet_on_it_and_torch_listens_on_all_its_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not prevented: whoever reaches the port takes part. Between pods, policies decide who does."""
    monkeypatch.delenv(distributed.NODES, raising=False)
    settings = distributed.rendezvous_settings("r")
    assert (settings["rdzv_endpoint"], settings["local_addr"]) == ("127.0.0.1:0", "127.0.0.1")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listening = [each.laddr for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN]
    (listens,) = [address.ip for address in listening if address.port == store.port]
    assert listens in ("::", "0.0.0.0"), "all addresses, with IPv6 or without"
