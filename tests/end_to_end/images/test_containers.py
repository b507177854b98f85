"""One container run to its end, and kfp's own way of doing it as the negative control."""

import contextlib
import io
import json
from typing import Any

import pytest
from kfp.local import docker_task_handler

from baton.errors import UserError
from baton.local import docker
from baton.local.docker import Containers, Needs, containers_installed
from baton.recipe import load

STAGE = ["--function_to_execute", "train_chunk"]
FAILS_LOUDLY = ["sh", "-c", "yes 'a line of a stage that tells much' | head -n 100000; exit 7", *STAGE]


def run(engine: Any, image: str, script: str, needs: Needs | None = None, **arguments: Any) -> tuple[int, list[str]]:
    containers = Containers({"train_chunk": needs or Needs()})
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = containers.run(engine, image, ["sh", "-c", script, *STAGE], {}, **arguments)
    return code, output.getvalue().splitlines()


def left(engine: Any, mark: str) -> list[Any]:
    return engine.containers.list(all=True, filters={"label": f"baton-test={mark}"})


def test_a_failure_after_much_output_is_a_failure(engine, image):
    with containers_installed(Containers({})), contextlib.redirect_stdout(io.StringIO()) as output:
        code = docker_task_handler.run_docker_container(engine, image, FAILS_LOUDLY, {})
    assert code == 7
    assert output.getvalue().count("\n") == 100_000


def test_kfp_alone_takes_a_failure_for_a_success(engine, image):
    """Once this fails, upstream has mended it, and `installed` can go."""
    with contextlib.redirect_stdout(io.StringIO()):
        codes = [docker_task_handler.run_docker_container(engine, image, FAILS_LOUDLY, {}) for _ in range(3)]
    assert 0 in codes


def test_kfp_has_its_own_function_back_afterwards():
    before = docker_task_handler.run_docker_container
    with pytest.raises(KeyError), containers_installed(Containers({})):
        raise KeyError
    assert docker_task_handler.run_docker_container is before


def test_lines_stay_whole_where_both_streams_are_used(engine, image):
    long = "é" * 30_000  # more than the engine passes on at once
    script = f"printf 'begin '; echo to-errors >&2; sleep 0.3; printf '{long} end\\n'; printf 'no newline'"
    code, lines = run(engine, image, script)
    assert code == 0
    assert sorted(lines) == ["begin " + long + " end", "no newline", "to-errors"]


def test_more_memory_than_the_limit_is_told(engine, image):
    script = "python3 -c 'x = bytearray(10**9); print(len(x))'"
    code, lines = run(engine, image, script, Needs(memory=64 * 2**20))
    assert code == 137
    assert json.loads(lines[-1].removeprefix("::baton ")) == {
        "event": "error",
        "stage": "train chunk",
        "message": "it was killed when its memory reached 0.0625 GiB (resources.memory).",
        "exit_code": 1,
    }


def test_shared_memory_is_as_asked(engine, image):
    script = "df --output=size -B1 /dev/shm | tail -n 1 | tr -d ' '"
    assert run(engine, image, script, Needs(shm=200 * 2**20)) == (0, ["209715200"])
    assert run(engine, image, script)[1] == ["67108864"]  # the engine's own, in which a checkpoint soon has no room


def test_an_image_that_is_not_there_is_one_message(engine, scratch_recipe, tmp_path):
    document = {**scratch_recipe, "store": str(tmp_path), "data": {"source": "builtin:stdlib-docs"}}
    recipe = load.validate({**document, "resources": {"image": "baton-none:1"}}, origin="test")
    expected = r"image 'baton-none:1' cannot be used: it is not on this engine\. Build one with `make images`"
    with pytest.raises(UserError, match=expected), docker.runner(recipe, "", str(tmp_path)):
        pass


def test_is_removed_whatever_interrupts_it(engine, image):
    class Interrupted(io.StringIO):
        def write(self, text: str) -> int:
            raise KeyboardInterrupt

    command = ["sh", "-c", "echo started; sleep 100", *STAGE]
    with pytest.raises(KeyboardInterrupt), contextlib.redirect_stdout(Interrupted()):
        Containers({}).run(engine, image, command, {}, labels={"baton-test": "interrupted"})
    assert left(engine, "interrupted") == []


def test_a_refusal_is_one_message_and_leaves_nothing(engine, image):
    with pytest.raises(UserError, match=r"refuses a container of .*no-such-program"):
        Containers({}).run(engine, image, ["no-such-program", *STAGE], {}, labels={"baton-test": "refused"})
    assert left(engine, "refused") == []
