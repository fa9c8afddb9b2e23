from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fsdpplan.errors import LaunchError
from fsdpplan.run.engines.engine import JobState
from fsdpplan.run.follow import watch
from fsdpplan.run.follow.follow import Follower
from fsdpplan.run.follow.watch import End, follow_jobs, listening
from tests.run.displays import Remembers


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_ASK_SECONDS", "LAST_ASK_SECONDS", "LOOK_SECONDS", "LOG_SECONDS"):
        monkeypatch.setattr(watch, name, 0.01)


def state(word: str, **values: object) -> JobState:
    ended = word not in ("PENDING", "RUNNING")
    done = word == "COMPLETED"
    given = {"reason": "", "exit_code": 0, "nodes": "", **values}
    return JobState(state=word, ended=ended, succeeded=done, **given)  # type: ignore[arg-type]


@dataclass
class Engine:
    """Plays a list of states for each job, the last one ever after."""

    plays: dict[str, list[JobState | None]]
    name: str = "slurm"
    refuses: bool = False
    cancelled: list[str] = field(default_factory=list)
    told_to_save: list[str] = field(default_factory=list)
    on_ask: Callable[[int], None] = lambda _: None
    asked: int = 0
    printed: list[str] = field(default_factory=list)

    def submit(
        self,
        *,
        script: Path,
        folder: Path,
        environment: Mapping[str, str],
        after: str | None = None,
    ) -> str:
        raise AssertionError("nothing is submitted")

    def state(self, job_id: str) -> JobState | None:
        self.asked += 1
        self.on_ask(self.asked)
        if job_id in self.cancelled:
            return state("CANCELLED", exit_code=143)
        left = self.plays[job_id]
        return left.pop(0) if len(left) > 1 else left[0]

    def log_lines(self, job_id: str) -> list[str]:
        lines, self.printed = self.printed, []
        return lines

    def save_and_leave(self, job_id: str) -> None:
        self.told_to_save.append(job_id)

    def cancel(self, job_id: str) -> bool:
        if not self.refuses:
            self.cancelled.append(job_id)
        return not self.refuses


@dataclass
class Watched:
    folder: Path
    display: Remembers = field(default_factory=Remembers)

    def follow(self, engine: Engine, *jobs: str, cancel_on_exit: bool = False) -> End:
        follower = Follower(
            metrics=self.folder / "metrics.jsonl",
            display=self.display,
            run_folder=self.folder,
            from_start=True,
        )
        with listening() as asked:
            return follow_jobs(
                engine,
                jobs,
                follower=follower,
                display=self.display,
                asked=asked,
                cancel_on_exit=cancel_on_exit,
            )


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


RUNNING = state("RUNNING", nodes="node[1-2]")


def test_a_job_is_followed_through_its_states(watched: Watched, tmp_path: Path) -> None:
    log = tmp_path / "job-1.out"
    log.write_text("1: hello\n")
    running = state("RUNNING", nodes="node[1-2]", log=log)
    pending = state("PENDING", reason="Resources", expected_start="tomorrow")
    later = state("PENDING", reason="Resources", expected_start="the day after")
    engine = Engine({"1": [pending, later, running, running, state("COMPLETED", log=log)]})
    end = watched.follow(engine, "1")
    assert (end.exit_code, end.ended) == (0, True)
    assert watched.display.states == [
        "job 1: PENDING (Resources), expected to start tomorrow",
        "job 1: RUNNING on node[1-2]",
        "job 1: COMPLETED",
    ]
    assert watched.display.lines == ["node2: hello"]


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        (state("FAILED", exit_code=7), 7),
        (state("CANCELLED", exit_code=143), 143),
        (state("TIMEOUT"), 1),
    ],
)
def test_the_exit_code_is_the_jobs(watched: Watched, ended: JobState, code: int) -> None:
    assert watched.follow(Engine({"1": [ended]}), "1").exit_code == code


def test_a_job_that_is_requeued_is_followed_on(watched: Watched) -> None:
    again = state("PENDING", reason="BeginTime", restarts=1)
    engine = Engine({"1": [RUNNING, again, RUNNING, state("COMPLETED", restarts=1)]})
    assert watched.follow(engine, "1").exit_code == 0
    assert "job 1: PENDING (BeginTime), started again 1x" in watched.display.states


def test_a_silent_engine_is_given_some_time(watched: Watched) -> None:
    engine = Engine({"1": [None, None, None, state("COMPLETED")]})
    assert watched.follow(engine, "1").exit_code == 0


def test_an_engine_that_stays_silent_is_reported(watched: Watched) -> None:
    with pytest.raises(LaunchError, match="--attach"):
        watched.follow(Engine({"1": [None]}), "1")


def test_output_that_is_no_file_is_shown(watched: Watched) -> None:
    engine = Engine({"1": [RUNNING, state("COMPLETED")]}, printed=["from a pod"])
    watched.follow(engine, "1")
    assert watched.display.lines == ["from a pod"]


def test_a_job_that_has_to_end_is_cancelled(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Follower, "verdict", "it does what it should not")
    engine = Engine({"1": [RUNNING]})
    assert watched.follow(engine, "1").exit_code == 143
    assert engine.cancelled == ["1"]
    assert "ending job 1: it does what it should not" in watched.display.states


def sends(*numbers: signal.Signals) -> Callable[[int], None]:
    """At the second question, and at the ones after it, one signal each."""

    def on_ask(asked: int) -> None:
        if 2 <= asked < 2 + len(numbers):
            os.kill(os.getpid(), numbers[asked - 2])

    return on_ask


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_who_leaves_leaves_the_job_running(
    watched: Watched, number: signal.Signals, code: int
) -> None:
    engine = Engine({"1": [RUNNING]}, on_ask=sends(number))
    end = watched.follow(engine, "1")
    assert (end.exit_code, end.ended, engine.cancelled) == (code, False, [])
    assert "fsdpplan run --attach" in watched.display.states[-1]


def test_only_ctrl_c_asks(watched: Watched) -> None:
    watched.display.answer = False
    assert not watched.follow(Engine({"1": [RUNNING]}, on_ask=sends(signal.SIGTERM)), "1").ended
    assert watched.display.questions == []


def test_who_does_not_leave_it_running_ends_the_job(watched: Watched) -> None:
    watched.display.answer = False
    engine = Engine({"1": [RUNNING], "2": [state("PENDING")]}, on_ask=sends(signal.SIGINT))
    end = watched.follow(engine, "1", "2")
    assert watched.display.questions == ["leave job 1 running?"]
    assert (end.exit_code, end.ended) == (130, True)
    assert engine.cancelled == ["2", "1"], "the last one first"


def test_cancel_on_exit_asks_nothing(watched: Watched) -> None:
    engine = Engine({"1": [RUNNING]}, on_ask=sends(signal.SIGTERM))
    end = watched.follow(engine, "1", cancel_on_exit=True)
    assert (end.exit_code, end.ended, engine.cancelled) == (143, True, ["1"])


def test_a_job_that_cannot_be_cancelled_is_left(watched: Watched) -> None:
    engine = Engine({"1": [RUNNING]}, on_ask=sends(signal.SIGINT), refuses=True)
    end = watched.follow(engine, "1", cancel_on_exit=True)
    assert (end.exit_code, end.ended) == (130, False)
    assert any("could not be cancelled" in text for text in watched.display.states)


def test_a_second_ctrl_c_leaves_at_once(watched: Watched) -> None:
    engine = Engine({"1": [None]}, on_ask=sends(signal.SIGINT))

    def twice(asked: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    engine.on_ask = twice
    with pytest.raises(KeyboardInterrupt):
        watched.follow(engine, "1")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_who_leaves_at_once_is_told_that_the_job_goes_on(watched: Watched) -> None:
    engine = Engine({"1": [RUNNING]})

    def twice(asked: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    engine.on_ask = twice
    with pytest.raises(KeyboardInterrupt):
        watched.follow(engine, "1")
    assert any("job 1 goes on without you" in text for text in watched.display.states)


def test_a_ctrl_c_while_the_job_is_cancelled_comes_not_between(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine({"1": [RUNNING], "2": [RUNNING]}, on_ask=sends(signal.SIGINT))
    cancel = engine.cancel

    def impatient(job_id: str) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return cancel(job_id)

    monkeypatch.setattr(engine, "cancel", impatient)
    watched.display.answer = False
    end = watched.follow(engine, "1", "2")
    assert (end.exit_code, end.ended, engine.cancelled) == (130, True, ["2", "1"])


def test_usr1_goes_to_the_job_and_it_is_followed_on(watched: Watched) -> None:
    engine = Engine({"1": [RUNNING, RUNNING, RUNNING, RUNNING]}, on_ask=sends(signal.SIGUSR1))

    def saved() -> None:
        while not engine.told_to_save:
            time.sleep(0.01)
        engine.plays["1"] = [state("COMPLETED")]

    thread = threading.Thread(target=saved)
    thread.start()
    assert watched.follow(engine, "1").exit_code == 0
    thread.join()
    assert engine.told_to_save == ["1"]


START = '{"event": "start", "step": 0, "steps": 2}\n{"step": 1}\n'


def test_a_chain_is_followed_as_one_job(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(START)
    engine = Engine({"1": [RUNNING, state("TIMEOUT")], "2": [RUNNING, state("COMPLETED")]})
    end = watched.follow(engine, "1", "2")
    assert (end.exit_code, end.job_id, engine.cancelled) == (0, "2", [])


def test_the_rest_of_a_chain_is_cancelled_when_all_steps_are_done(
    watched: Watched, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text(START + '{"step": 2}\n')
    engine = Engine({"1": [RUNNING, state("COMPLETED")], "2": [], "3": []})
    end = watched.follow(engine, "1", "2", "3")
    assert (end.exit_code, end.job_id, engine.cancelled) == (0, "1", ["3", "2"])
    assert watched.display.states[-1] == "cancelled job 2, 3 of the chain: all steps are done"


CANCELLED = state("CANCELLED", exit_code=143)


def test_a_chain_whose_first_job_was_cancelled_is_what_it_trained(
    watched: Watched, tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").write_text(START)
    engine = Engine({"1": [RUNNING, CANCELLED], "2": [state("COMPLETED")]})
    end = watched.follow(engine, "1", "2")
    assert (end.exit_code, end.job_id, engine.cancelled) == (0, "2", [])
    engine = Engine({"1": [RUNNING, CANCELLED], "2": [state("PENDING")]})
    end = watched.follow(engine, "1", "2")
    assert (end.exit_code, end.job_id, engine.cancelled) == (143, "1", ["2"])
    done = START + '{"event": "step", "step": 2}\n{"event": "summary"}\n'
    (tmp_path / "metrics.jsonl").write_text(done)
    engine = Engine({"1": [RUNNING, CANCELLED], "2": [state("PENDING")]})
    end = watched.follow(engine, "1", "2")
    assert (end.exit_code, end.job_id, engine.cancelled) == (0, "1", ["2"])


def test_a_chain_ends_with_a_job_that_fails_by_itself(watched: Watched) -> None:
    engine = Engine({"1": [state("FAILED", exit_code=7)], "2": []})
    end = watched.follow(engine, "1", "2")
    assert (end.exit_code, engine.cancelled) == (7, ["2"])


def test_starts_of_the_job_are_said_and_name_its_lines(watched: Watched, tmp_path: Path) -> None:
    log = tmp_path / "1.out"
    log.write_text("1: hello\n")
    (tmp_path / "attempts.jsonl").write_text(
        '{"event": "attempt", "attempt": 1, "restart": 0, "nodes": ["node1", "node2"]}\n'
        '{"event": "attempt_ended", "attempt": 1, "exit_code": 1, "next": "retry", '
        '"reason": "node2 failed"}\n'
        '{"event": "attempt", "attempt": 2, "most": 4, "nodes": ["node1", "node3"]}\n'
    )
    running = state("RUNNING", nodes="node[1-3]", log=log)
    watched.follow(Engine({"1": [running, state("COMPLETED", log=log)]}), "1")
    assert watched.display.states[1:-1] == [
        "attempt 1 on node[1-2]",
        "attempt 1 ended with exit code 1: node2 failed; it is started again in the same "
        "allocation",
        "attempt 2 of 4 on node[1,3]: node2 failed",
    ]
    assert watched.display.lines == ["node3: hello"]
