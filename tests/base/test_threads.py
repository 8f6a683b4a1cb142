"""Small work runs on one thread, and the number of threads is what it was afterwards."""

from __future__ import annotations

import threading

import pytest
import torch
from hdnn.base.threads import SMALL, one_thread, threads_allowed, threads_for

import hdnn
from hdnn.training import fit


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_comes_back_after_nested_blocks_and_errors():
    def fail():
        with one_thread():
            with one_thread():
                assert torch.get_num_threads() == 1
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert torch.get_num_threads() == 3


def test_blocks_of_several_threads_of_python_do_not_disturb_each_other():
    inside, done, found = threading.Event(), threading.Event(), []

    def other():
        with one_thread():
            inside.set()
            done.wait(30)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    with one_thread():
        thread.start()
        assert inside.wait(30)
    assert torch.get_num_threads() == 3
    done.set()
    thread.join()
    assert found == [3]
    assert torch.get_num_threads() == 3


def test_only_small_work_on_the_cpu_has_one_thread():
    for numbers, device, threads in ((1, "cpu", 1), (SMALL, "cpu", 3), (1, "cuda", 3)):
        with threads_for(numbers, device):
            assert torch.get_num_threads() == threads


def test_a_small_training_has_one_thread_and_a_large_one_all():
    for batch, threads in ((64, 1), (SMALL, 3)):
        x, seen = torch.zeros(SMALL // 4, 2), []
        model = hdnn.Model(hdnn.Augment(2, 4), hdnn.H2(4, 1), hdnn.SigmoidHead(4))

        def look(_, seen=seen):
            seen.append(torch.get_num_threads())
            return True

        data = x, torch.arange(len(x)) % 2
        fit(model, *data, epochs=1, batch=batch, callbacks=[look], solver="joint", progress=False)
        assert seen == [threads]
        assert torch.get_num_threads() == 3


def test_kernels_know_how_many_threads_pytorch_takes_outside():
    assert threads_allowed() == 3
    with one_thread(), one_thread():
        assert torch.get_num_threads() == 1
        assert threads_allowed() == 3
    assert threads_allowed() == 3


def test_who_asks_for_one_thread_elsewhere_gets_one():
    found = []

    def other() -> None:
        torch.set_num_threads(1)
        found.append(threads_allowed())

    with one_thread():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [1]
