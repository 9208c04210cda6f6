"""The ring in which ranks watch each other: everyone is watched, and an alarm reaches everyone soon."""

from __future__ import annotations

import json
import socket

import pytest

from spmd_rl.comm.alarm import Alarm, one_line
from spmd_rl.comm.link import Link, Peer, process_start, successors


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 64, 100])
def test_a_rank_is_watched_by_as_many_as_it_watches(size: int) -> None:
    watchers = {rank: [other for other in range(size) if rank in successors(other, size)] for rank in range(size)}
    for rank in range(size):
        neighbours = successors(rank, size)
        assert rank not in neighbours and len(set(neighbours)) == len(neighbours)
        assert len(watchers[rank]) == len(neighbours) == len(successors(0, size))
    if size >= 3:
        assert all(len(watchers[rank]) >= 2 for rank in range(size))


def test_an_alarm_reaches_4096_ranks_in_few_hops() -> None:
    size = 4096
    neighbours: list[set[int]] = [set() for _ in range(size)]
    for rank in range(size):
        for other in successors(rank, size):  # messages go both ways
            neighbours[rank].add(other)
            neighbours[other].add(rank)
    assert max(map(len, neighbours)) <= 12
    reached, frontier, hops = {0}, {0}, 0
    while len(reached) < size:
        frontier = {other for rank in frontier for other in neighbours[rank]} - reached
        reached |= frontier
        hops += 1
    assert hops <= 13


def test_an_alarm_reaches_the_survivors_of_a_dead_node() -> None:
    size, dead = 64, set(range(16, 24))
    neighbours: list[set[int]] = [set() for _ in range(size)]
    for rank in range(size):
        for other in successors(rank, size):
            neighbours[rank].add(other)
            neighbours[other].add(rank)
    reached, frontier = {15}, {15}
    while frontier:
        frontier = {other for rank in frontier for other in neighbours[rank]} - reached - dead
        reached |= frontier
    assert reached == set(range(size)) - dead


def test_links_carry_lines_both_ways_and_tell_the_end() -> None:
    ours, theirs = socket.socketpair()
    left, right = Link(ours), Link(theirs)
    left.post({"stage": "Übung", "step": 1})
    left.post({"goodbye": 0})
    assert right.receive() == ([{"stage": "Übung", "step": 1}, {"goodbye": 0}], False)
    assert right.receive() == ([], False)
    ours.close()
    assert right.receive() == ([], True)
    right.post({"stage": "x", "step": 2})  # to nobody: no error, reading is what notices
    assert right.flush()
    theirs.close()


def test_a_neighbour_that_does_not_read_costs_no_memory_and_no_time() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    for step in range(20000):
        link.post({"stage": "rollout", "step": step}, droppable=True)
    assert len(link._out) < 100  # at most one message waits
    link.post({"alarm": {}})
    other = Link(theirs)
    messages: list[dict[str, object]] = []
    while not link.flush():
        messages += other.receive()[0]
    messages += other.receive()[0]
    assert messages[-1] == {"alarm": {}}  # what matters is not dropped
    steps = [message["step"] for message in messages[:-1]]
    assert steps == list(range(len(steps)))  # and no line is cut
    ours.close()
    theirs.close()


def test_a_stranger_on_the_port_is_hung_up_on() -> None:
    ours, theirs = socket.socketpair()
    link = Link(ours)
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert link.receive() == ([], True)
    ours.close()
    theirs.close()


def test_the_line_says_who_where_what_and_who_noticed() -> None:
    died = Alarm("died", 3, "n1", 123, "rollout", 7, 4)
    assert died.line() == "rank 3 (host n1, pid 123) died in stage 'rollout' of step 7; rank 4 stops the job"
    assert Alarm(**json.loads(json.dumps(died.message()))) == died
    failed = Alarm("failed", 3, "n1", 123, "reward", 7, 3, one_line(ValueError("no column\nmore")))
    assert failed.line().endswith("failed in stage 'reward' of step 7: ValueError: no column; it stops the job")
    assert one_line(AssertionError()) == "AssertionError"


def test_only_the_very_process_is_killed() -> None:
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        start = process_start(child.pid)
        assert start
        peer = Peer(1, "h", "machine", child.pid, start, "127.0.0.1", 1)
        peer.kill_if_here("another machine")
        Peer(1, "h", "machine", child.pid, str(int(start) + 1), "127.0.0.1", 1).kill_if_here("machine")
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
        peer.kill_if_here("machine")
        assert child.wait(10) == -9
        assert process_start(child.pid) == ""
    finally:
        child.kill()
