"""Pipeline schedules as data: complete, free of deadlock, as long and as large as the formulas, and torch's own."""
import re
import time
import weakref
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from xml.etree import ElementTree

import grids
import pytest
import torch
import torch.distributed as dist
from rendezvous import check_rendezvous, replay, stream_of_link
from torch.distributed.pipelining import schedules as torchs

import pp
from core import collectives, config, rules
from core.gradients import backward_weight
from core.param import Spec, parameter
from plan import costs
from plan.memory import backwards_in_memory
from run import timeline
from run.meter import Meter
from schedules import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    Span,
    Transfer,
    activations_held,
    bubble,
    make_plan,
    required_results,
    simulate,
    with_transfers,
)
from test_dryrun import measured_on
from tp import MATMUL, Column, Row, TensorParallel

VALID = [(p, m) for p in range(1, 9) for m in (*range(1, 13), 16, 17, 24, 31, 32)]


def possible(*request):
    """The plan of a request; None if it is refused."""
    try:
        return make_plan(*request)
    except ValueError:
        return None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_everything_happens_once_in_order_and_nobody_waits_for_ever(schedule):
    """In every plan for p 1..8 and m 1..12 and some to 32; for p to 4 and m to 12 also with other groups."""
    seen = 0
    for p, m in VALID:
        choices = [(0, 0)]
        if SCHEDULES[schedule].grouped:
            groups = {min(p, m), min(m, p + 1), min(2 * p, m), m} if p <= 4 and m <= 12 else ()
            choices = [(1, 0), (2, 0), (3, m), *((2, n) for n in groups)]
        for v, n in choices:
            plan, order = possible(schedule, p, m, v, n), defaultdict(str)
            if plan is None:
                continue
            for r, actions in enumerate(plan.ranks):
                for op, stage, k in actions:
                    order[stage, k] += op
                    turn, place = divmod(stage, p)
                    comes_back = SCHEDULES[schedule].v_shaped and turn % 2 == 1
                    if schedule == "dualpipe" and k >= m // 2:  # from the other end
                        comes_back = True
                    assert plan.owner[stage, k] == r == (p - 1 - place if comes_back else place)
            assert plan.stages == p * (1 if schedule == "dualpipe" else v or SCHEDULES[schedule].chunks)
            assert order.keys() == {(stage, k) for stage in range(plan.stages) for k in range(m)}
            assert set(order.values()) <= {"FB", "FIW"}
            lists = with_transfers(plan)
            check_rendezvous(lists)
            sent = sum(isinstance(item, Transfer) for items in lists for item in items)
            crossing = sum(plan.owner[s, k] != plan.owner[s + 1, k] for s in range(plan.stages - 1) for k in range(m))
            assert sent == 2 * 2 * crossing  # an activation and a gradient, each sent and received
            seen += 1
    assert seen > 20


def test_a_plan_that_cannot_end_is_found():
    plan = make_plan("1f1b", 2, 2)
    stuck = plan._replace(ranks=[[*reversed(plan.ranks[0])], plan.ranks[1]])
    for function in (with_transfers, simulate):
        with pytest.raises(ValueError, match="wait for each other: rank 0 cannot start B0.1, rank 1 cannot start F1"):
            function(stuck)
    ended = plan._replace(ranks=[[Action("B", 0, 0)], []])  # the second rank waits for nobody
    with pytest.raises(ValueError, match="^ranks wait for each other: rank 0 cannot start B0.0$"):
        with_transfers(ended)


ANY = " and ".join(name for name, schedule in SCHEDULES.items() if schedule.grouped)


@pytest.mark.parametrize("wrong, says", [
    (("1f1c", 2, 4), f"unknown, use one of {', '.join(SCHEDULES)}$"),
    (("1f1b", 2, 4, 2), f"2 model chunks per rank: schedule 1f1b has 1, {ANY} any$"),
    (("1f1b", 2, 4, 0, -1), "groups of -1: must be 0, for the default, or more$"),
    (("1f1b", 2, 4, -1), "-1 model chunks per rank, .*: must be 0, for the default, or more$"),
    (("1f1b", 2, 0), "0 micro-batches: must be above 0$"), (("1f1b", 0, 2), "0 ranks, .*: must be above 0$"),
    (("zb-v", 2, 4, 3), "schedule zb-v has 2"), (("interleaved", 4, 9, 3, 4), "the last one, too"),
    (("interleaved", 4, 8, 2, 3), "must hold at least 4"), (("dualpipev", 4, 7), "needs at least 8 on 4 ranks"),
    (("dualpipe", 3, 6), "needs even numbers of both")])
def test_what_would_not_work_is_refused_with_what_would(wrong, says):
    with pytest.raises(ValueError, match=says):
        make_plan(*wrong)


def without(op: str, stage: int):
    """The order of 1f1b without this action of the last micro-batch."""
    def order(r, p, m, v, n):
        return [action for action in SCHEDULES["1f1b"].order(r, p, m, v, n) if action != Action(op, stage, m - 1)]
    return order


def twice(r, p, m, v, n):
    return [action for action in SCHEDULES["1f1b"].order(r, p, m, v, n) for _ in range(1 + (action.op == "B"))]


def on_one_rank(r, p, m, v, n):
    return [Action(op, stage, k) for k in range(m) for op, stages in (("F", range(p)), ("B", reversed(range(p))))
            for stage in stages if r == 0]


@pytest.mark.parametrize("schedule, says", [
    (Schedule(without("B", 0)), "stage 0 and micro-batch 3 have F on rank 0, and need F B or F I W"),
    (Schedule(without("B", 1)), "stage 1 and micro-batch 3 have F on rank 1, and need F B or F I W"),
    (Schedule(without("F", 1)), "no rank has F1.3, the forward of stage 1 and micro-batch 3"),
    (Schedule(lambda r, p, m, v, n: [action._replace(op="I") if action.op == "B" else action for action in
                                     SCHEDULES["1f1b"].order(r, p, m, v, n)]),
     "stage 0 and micro-batch 0 have F I on rank 0, and need F B or F I W"),
    (Schedule(twice), "stage 0 and micro-batch 0 have F B B on rank 0, and need F B or F I W"),
    (SCHEDULES["zb-v"]._replace(v_shaped=False), "stage 3 is on rank 0: 2 stages per rank go round 2 ranks, 0, 1, 2 ."),
    (SCHEDULES["interleaved"]._replace(v_shaped=True), "stage 2 is on rank 0: 2 stages per rank go round 2 ranks"),
    (SCHEDULES["zb-v"]._replace(chunks=3), "no rank has F4.0, the forward of stage 4 and micro-batch 0"),
    (Schedule(on_one_rank), "stage 1 is on rank 0: 1 stages per rank go round 2 ranks")], ids=[
        "no B of the first stage", "no B of the last", "no F", "I without W", "B twice", "a V that nobody declared",
        "no V", "too few stages", "one rank"])
def test_a_schedule_of_ones_own_that_is_wrong_is_one_line(schedule, says, monkeypatch):
    """By the picture and by train.py, before anything runs. With a transfer missing, ranks would wait for ever; without
    a backward, gradients would be wrong."""
    monkeypatch.setitem(SCHEDULES, "mine", schedule)
    for section in timeline.Flags, config.Grid:  # whose choices were made of the table when it was without it
        field = next(field for field in fields(section) if field.name == "schedule")
        monkeypatch.setattr(field, "metadata", dict(field.metadata, choices=("mine",)))
    line = re.escape(f"schedule mine: {says}") + "[^\n]*$"
    with pytest.raises(ValueError, match=f"^{line}"):
        timeline.main("--schedule mine --pp 2 --micro-batches 4".split())
    flags = "--schedule mine --pp 2 --micro-batch 1 --global-batch 4"
    with pytest.raises(ValueError, match=f"^{flags}: {line}"):
        rules.parse(f"{flags} --layers 6".split(), 2)


# ---- time and memory ------------------------------------------------------------------------------------------------

def test_bubbles_are_those_of_the_formulas():
    """With m at least 2p, where the pipeline is full, and W <= min(F, I); costs of a rank's time for all its stages."""
    for p, m in [(p, m) for p, m in VALID if m >= 2 * p]:
        for F, I, W in ((1, 1, 1), (1, 1.25, 0.75), (2, 2, 1)) if m <= 17 else [(1, 1, 1)]:
            B = I + W

            formulas = [
                ("afab", 1, 0, (p - 1) * (F + B)), ("1f1b", 1, 0, (p - 1) * (F + B)),
                ("zb-h1", 1, 0, (p - 1) * (F + I - W)),
                *(("interleaved", v, n, (p - 1) * (F + B) / v) for v in (2, 3) for n in (p, 2 * p, m) if m % n == 0)]
            if m % p == 0:
                formulas.append(("zb1p", 2, 0, (p - 1) * (F + I - W) / 2))
            if F == I == W:
                formulas += [("zb-v", 2, 0, (p - 1) * F / 2), ("dualpipev", 2, 0, (p - 1) * F / 2)]
            for schedule, v, n, idle in formulas:
                plan = make_plan(schedule, p, m, v, n)
                assert bubble(simulate(plan, Costs(F / v, I / v, W / v))) == pytest.approx(idle)
            if F == I == W and p % 2 == m % 2 == 0:  # a micro-batch goes through one of a rank's two chunks
                assert bubble(simulate(make_plan("dualpipe", p, m))) == pytest.approx((p - 2) * F / 2)
            spans = simulate(make_plan("zb-h2", p, m), Costs(F, I, W))
            longest = max(rank[-1].stop - rank[0].start for rank in spans)  # from a rank's own first F to its last W
            assert longest == pytest.approx(m * (F + B) + (p - 1) * (F + I - 2 * W))


def bubble_of_pairs(p: int, m: int, pair: float) -> float:
    """The bubble of DualPipe, F = I = W = 1, if a forward and the backward after it are one action that takes `pair`,
    and both results are there at its end, as in DualPipe's repository."""
    plan, seconds = make_plan("dualpipe", p, m), dict(F=1, B=2, I=1, W=1)
    waiting = [[] for _ in range(p)]
    for r, actions in enumerate(plan.ranks):
        for action in actions:
            if action.op == "B" and waiting[r][-1][-1].op == "F":
                waiting[r][-1].append(action)
            else:
                waiting[r].append([action])
    there, ends, busy = {}, [0.0] * p, [0.0] * p  # result -> when it is there
    while any(waiting):
        for r in range(p):
            while waiting[r] and (needs := set().union(*(
                    required_results(action, plan.stages) for action in waiting[r][0]))) <= there.keys():
                block = waiting[r].pop(0)
                took = pair if len(block) == 2 else seconds[block[0].op]
                ends[r] = max([ends[r], *map(there.get, needs)]) + took
                busy[r] += took
                there |= {action.result: ends[r] for action in block}
    return max(ends) - min(busy)


@pytest.mark.parametrize("p", [4, 6, 8, 10])
@pytest.mark.parametrize("pair", [3.0, 2.5])  # without overlap, F + B, and with
def test_dualpipes_repository_counts_a_forward_and_a_backward_as_one_action(p, pair):
    """Its README: (PP/2-1)(F&B+B-3W); so 2, 4 and 6 of 4, 6 and 8 ranks without overlap, where separate actions idle
    for half of that."""
    for m in (2 * p, 4 * p):
        assert bubble_of_pairs(p, m, pair) == pytest.approx((p / 2 - 1) * (pair + 2 - 3 * 1))
        assert bubble(simulate(make_plan("dualpipe", p, m))) == pytest.approx(bubble_of_pairs(p, m, 3.0) / 2)


def held_if_inputs_leave(part: float, actions: list[Action]) -> list[float]:
    """Activations after each action, in those of one stage and micro-batch, of which an I leaves this part."""
    return list(accumulate(dict(F=1, B=-1, I=part - 1, W=-part)[action.op] for action in actions))


def test_backwards_that_memory_depends_on_hold_most():
    for schedule in EXECUTED:
        for actions in make_plan(schedule, 4, 12).ranks:
            most = {}
            for (op, stage, _), held in zip(actions, [0, *activations_held(actions)]):
                if op != "F":
                    most[op, stage] = max(most.get((op, stage), 0), held)
            found = backwards_in_memory(actions)
            assert {key: max(one.held for one in found if (one.op, one.stage) == key) for key in most} == most


def test_activations_held_are_those_of_the_formulas():
    by_hand = [Action(op, 0, k) for op, k in (("F", 0), ("F", 1), ("I", 0), ("F", 2), ("W", 0), ("B", 1), ("I", 2))]
    assert activations_held(by_hand) == [1, 2, 2, 3, 2, 1, 1]
    for p, m in [(p, m) for p, m in VALID if m >= 2 * p]:
        def most(schedule, v=0, n=0, p=p, m=m):
            plan = make_plan(schedule, p, m, v, n)
            return [max(activations_held(actions)) / (plan.stages // p) for actions in plan.ranks]

        assert most("afab") == [m] * p
        assert most("1f1b") == [p - r for r in range(p)]
        for v in (2, 3) if m % p == 0 else ():
            assert most("interleaved", v) == pytest.approx([((v - 1) * p + 2 * (p - 1 - r) + 1) / v for r in range(p)])
        assert max(most("zb-h1")) == max(most("zb-v")) == p
        assert m % p or max(most("zb1p", 2)) == p
        assert max(most("zb-h2")) == 2 * p - 1
        assert max(most("dualpipev")) == pytest.approx(p + 0.5)
        if p % 2 == 0 and m % 2 == 0:
            assert max(most("dualpipe")) == p + 1
    plan = make_plan("zb-h1", 4, 8)  # with half of it needed until W
    assert [max(held_if_inputs_leave(0.5, actions)) for actions in plan.ranks] == [4, 3.5, 3, 2.5]


@pytest.mark.parametrize("schedule, p, m, extra", [
    ("1f1b", 8, 16, 0), ("zb-h1", 8, 16, 0), ("interleaved", 4, 8, 18), ("interleaved", 8, 16, 44),
    ("interleaved", 8, 32, 24), ("zb1p", 8, 16, 47), ("zb-v", 8, 16, 12), ("dualpipev", 8, 16, 16)])
def test_transfers_in_one_stream_cost_time_and_in_a_link_for_each_pair_none(schedule, p, m, extra):
    plan = make_plan(schedule, p, m)
    lists = with_transfers(plan)
    in_links, in_one_stream = (replay(lists, Costs(), stream) for stream in (
        stream_of_link, lambda item: isinstance(item, Transfer)))
    assert in_links == simulate(plan)
    ends = [max(rank[-1].stop for rank in spans) for spans in (in_links, in_one_stream)]
    assert round(100 * (ends[1] / ends[0] - 1)) == extra


def test_stages_may_take_different_times():
    """By hand: two stages of 1 + 2 and 3 + 4, and half a unit to send."""
    first, second = simulate(make_plan("1f1b", 2, 2), [Costs(1, 1, 1, 0.5), Costs(3, 2, 2, 0.5)])
    assert [(span.start, span.stop) for span in first] == [(0, 1), (1, 2), (9, 11), (16, 18)]
    assert [(span.start, span.stop) for span in second] == [(1.5, 4.5), (4.5, 8.5), (8.5, 11.5), (11.5, 15.5)]
    F = Action("F", 0, 0)  # a rank with less work is also idle before its first action and after its last
    assert bubble([[Span(F, 1.0, 4.0)], [Span(F, 1.0, 2.0), Span(F, 3.0, 3.5)]]) == 4 - 1.5


@pytest.mark.parametrize("p, m, n, held", [(4, 9, 5, 6.0), (8, 30, 10, 12.5), (8, 16, 8, 11.5), (4, 3, 3, 3.0)])
def test_interleaving_takes_the_smallest_possible_group_and_of_one_chunk_is_1f1b(p, m, n, held):
    """Which takes as long as one group of all micro-batches."""
    assert make_plan("interleaved", p, m, 1).ranks == make_plan("1f1b", p, m).ranks
    chosen, in_one_group = make_plan("interleaved", p, m), make_plan("interleaved", p, m, 2, m)
    assert chosen == make_plan("interleaved", p, m, 2, n)
    assert make_plan("interleaved", p, m, 2, m + 1) == in_one_group  # a ramp begins with fewer than a group
    assert max(max(activations_held(actions)) for actions in chosen.ranks) / 2 == held
    assert bubble(simulate(chosen)) == bubble(simulate(in_one_group))


BY_HAND = {  # the last of 4 ranks, 8 micro-batches, F, I and W of a stage one unit each
    "afab": "F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7",
    "1f1b": "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7",
    "zb-h1": "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7",
    "zb-h2": "F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7"}


@pytest.mark.parametrize("schedule", BY_HAND)
def test_four_ranks_as_drawn_by_hand(schedule):
    assert " ".join(f"{op}{k}" for op, _, k in make_plan(schedule, 4, 8).ranks[3]) == BY_HAND[schedule]


# ---- torch's own ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("schedule, name, v", [
    ("interleaved", "ScheduleInterleaved1F1B", 2), ("interleaved", "ScheduleInterleaved1F1B", 3),
    ("zb1p", "ScheduleInterleavedZeroBubble", 2), ("zb-v", "ScheduleZBVZeroBubble", 2),
    ("dualpipev", "ScheduleDualPipeV", 2)])
def test_the_order_is_that_of_torch(schedule, name, v):
    kind, compared = getattr(torchs, name), 0
    for p, m in VALID:
        rounds = max(1, m // p)  # what torch calls groups
        n = m // rounds if schedule in ("interleaved", "zb1p") else 0
        if p > 1 and m % rounds == 0 and (plan := possible(schedule, p, m, v, n)):
            fake = SimpleNamespace(pp_group_size=p, _n_microbatches=m, n_local_stages=v, num_stages=v * p,
                                   _num_stages=v * p, number_of_rounds=rounds, microbatches_per_round=m // rounds)
            for rank, actions in enumerate(plan.ranks):
                fake.rank = rank
                theirs = filter(None, kind._calculate_single_rank_operations(fake, rank))
                parts = [repr(part) for action in theirs for part in action.sub_actions or (action,)]
                assert [f"{stage}{op}{k}" for op, stage, k in actions] == parts
            compared += 1
    assert compared > 30


# ---- pictures -------------------------------------------------------------------------------------------------------

def test_boxes_lie_where_their_times_are_and_later_chunks_look_different():
    """Three columns per unit of time, one a gap. A rank's later chunk is in lower case or, with color, underlined."""
    spans = simulate(make_plan("zb-v", 2, 4))
    plain, colored = (timeline.draw(spans, color).splitlines() for color in (False, True))
    for r, (actions, line, bright) in enumerate(zip(spans, plain, colored)):
        assert line.startswith(f"rank  {r} ") and len(line[8:].split()) == len(actions)
        for (op, stage, k), start, stop in actions:
            assert line[8 + round(3 * start):8 + round(3 * stop)].strip() == f"{op if stage == r else op.lower()}{k}"
        boxes = re.findall(r"\033\[(4;)?48;5;(\d+);30m *(\d) *\033\[0m", bright)
        assert boxes == [("4;" * (stage != r), str(timeline.COLORS[op][1]), str(k)) for (op, stage, k), *_ in actions]
        assert len(re.sub(r"\033.*?m", "", bright)) == len(line) == 8 + 3 * actions[-1].stop - 1  # no gap at the end


def test_an_svg_shows_times_chunks_and_activations_to_scale():
    """780 pixels for the longest step, from x = 56 on; 13 for the most activations that a rank holds."""
    panels = {name: simulate(make_plan(name, 2, 4), Costs(*[of_stage] * 3))
              for name, of_stage in (("1f1b", 1.0), ("zb-v", 0.5))}
    unit, most = 780 / 15, 2  # 1f1b takes (4 + 1) (F + I + W) and holds 2 micro-batches, as zb-v does
    elements = ElementTree.fromstring(timeline.svg(panels)).findall("*")
    boxes = (item.attrib for item in elements if item.tag.endswith("rect") and "class" in item.attrib)
    held = (item.attrib["d"] for item in elements if item.get("class") == "held")
    for spans, stages in zip(panels.values(), (2, 4)):
        for r, actions in enumerate(spans):
            for ((op, stage, _), start, stop), box in zip(actions, boxes):
                place = [float(box["x"]), float(box["width"])]
                assert place == pytest.approx([56 + start * unit, (stop - start) * unit], abs=0.1)
                assert box["class"] == op and ("opacity" in box) == (stage != r)
            bottom, *levels = map(float, re.findall(r"[ V]([\d.]+)", next(held)))
            counts = activations_held([span.action for span in actions])
            assert levels == pytest.approx([bottom - 13 * count * 2 / stages / most for count in counts], abs=0.1)
    assert [box["class"] for box in boxes] == ["F", "B", "I", "W"] and not [*held]  # the legend


def test_a_schedule_is_drawn_with_the_chunks_and_groups_asked_for(capsys):
    """The first of four ranks holds most, by its warmup."""
    for flags, v, n in ("", 2, 4), ("--virtual-stages 3", 3, 4), ("--group 8", 2, 8), ("--virtual-stages 3 --group "
                                                                                       "8", 3, 8):
        timeline.main(f"--schedule interleaved {flags}".split())
        held = ((v - 1) * n + 2 * (4 - 1) + 1) / v
        assert capsys.readouterr().out.splitlines()[-2].endswith(f"holding up to {held:g} micro-batches")


@pytest.mark.parametrize("flags, says", [
    ("--schedule 1f1b --pp -1", "-1 ranks, 8 micro-batches: must be above 0"),
    ("--pp 100000", "--pp 100000, --micro-batches 8: must be at most 1000"),
    *((f"--costs {costs}", f"--costs {costs}: write three numbers, above 0 and below a million, such as 1,1,1")
      for costs in ("0,1,1", "nan,1,1", "1,1000000,1")),
    ("--group 4", "--virtual-stages and --group are for one schedule: name it with --schedule"),
    ("--svg /", "--svg /: is a folder, name a file"),
    ("--svg no/such/a.svg", "--svg no/such/a.svg: there is no folder no/such")])
def test_a_wrong_request_is_one_line(flags, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        timeline.main(flags.split())


def test_all_schedules_are_drawn_to_one_scale_and_a_rank_takes_equally_long_in_all(capsys, monkeypatch):
    """A rank of a schedule with two model chunks per rank has two stages of half the layers. A long step is smaller."""
    monkeypatch.setenv("COLUMNS", "2000")  # enough for any schedule
    timeline.main([])
    lines = capsys.readouterr().out.splitlines()
    ends = {line.split(":")[0]: float(line.split()[1]) for line in lines if "units of time" in line}
    assert set(ends) == set(SCHEDULES)
    assert ends["1f1b"] == 33 and ends["interleaved"] == 28.5 and ends["zb-v"] == 25.5
    widths = [max(map(len, lines[i - 4:i])) for i, line in enumerate(lines) if "units of time" in line]
    assert all(abs((width - 8) / end - 3) < 0.15 for width, end in zip(widths, ends.values()))
    monkeypatch.setenv("COLUMNS", "120")
    timeline.main("--costs 1000,1,1 --pp 2 --schedule 1f1b".split())
    assert all(len(line) <= 120 for line in capsys.readouterr().out.splitlines()[1:])


# ---- the engine -----------------------------------------------------------------------------------------------------

EXECUTED = [name for name, schedule in SCHEDULES.items() if schedule.runs]
T, H, F = 32, 4, 800  # what a stage saves is wide, what it sends narrow


def live_bytes(schedule: str, m: int) -> list[tuple[int, float]]:
    """Bytes alive when each action of this rank begins, and after the step: counted, and by the plan.

    A stage is tanh between two matrices. A forward keeps x and the result of tanh; between I and W the inputs and the
    output gradients of both matrices are left."""
    p, tp = dist.get_world_size(), TensorParallel()
    plan = make_plan(schedule, p, m)
    weights = {stage: (parameter(Spec(f"{stage} up", (F, H)), {}, torch.float64),
                       parameter(Spec(f"{stage} down", (H, F)), {}, torch.float64)) for stage in range(plan.stages)}
    meter = Meter()
    for weight in sum(weights.values(), ()):
        weight.data, weight.grad = torch.randn(weight.shape).double(), torch.zeros(weight.shape).double()
        meter.label("weights", weight, weight.grad)
    start, seen = torch.randn(T, H, dtype=torch.float64), []
    meter.label("weights", start)

    @contextmanager
    def around(action):
        seen.append(meter.live()["other"])
        yield

    def forward(stage, k, x):
        up, down = weights[stage]
        hidden = torch.tanh(Column.apply(start if x is None else x, tp, MATMUL, True, up))
        y = Row.apply(hidden, tp, MATMUL, False, down)
        return y.sum() if stage == plan.stages - 1 else y

    engine = pp.Engine(plan, grids.everyone(), around=around)
    with meter:
        engine.run(forward, (T, H), torch.float64)
    dist.barrier()
    planned = [0.0, *(count * T * (H + F) * 8 for count in held_if_inputs_leave(2.0, plan.ranks[dist.get_rank()]))]
    return list(zip([*seen, meter.settled()["other"]], planned))


@pytest.mark.parametrize("schedule", EXECUTED)
def test_bytes_alive_at_every_action_are_the_plans(pool, schedule):
    """But for what is sent and received, a few narrow tensors; after the step nothing is left."""
    m = max(8, 4 * SCHEDULES[schedule].min_micro_batches_per_rank)
    stages = make_plan(schedule, 4, m).stages // 4
    in_transit = stages * 2 * m * T * H * 8  # of each micro-batch one received and one sent
    for seen in pool.run(4, live_bytes, schedule=schedule, m=m):
        for counted, planned in seen:
            assert abs(counted - planned) <= in_transit < 0.2 * T * (H + F) * 8
        assert seen[-1] == (0, 0.0)


STAGES, WIDTH, ROWS = 4, 6, 8  # of a model of one layer per stage


def layers_and_batch() -> tuple[list[torch.nn.Linear], torch.Tensor, int]:
    """The same on every rank; with the number of micro-batches."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(STAGES)]
    for layer in layers:
        for weight in layer.parameters():
            weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    m = 8
    return layers, torch.randn(m, ROWS, WIDTH, generator=generator, dtype=torch.float64), m


def trained_in_stages(schedule: str) -> dict[int, list[torch.Tensor]]:
    """This rank's stages -> their weights and biases after three steps. schedule: "plain" for the plain pipeline."""
    layers, batch, m = layers_and_batch()
    group = grids.everyone()
    plan = None if schedule == "plain" else make_plan(schedule, group.size, m)
    owned = [stage for stage in range(STAGES) if (plan.owner[stage, 0] if plan else stage) == group.rank]
    optimizer = torch.optim.SGD([weight for stage in owned for weight in layers[stage].parameters()], lr=0.1)

    def forward(stage, k, x):
        y = torch.tanh(layers[stage](batch[k] if stage == 0 else x))
        return y.square().sum() / batch.numel() if stage == STAGES - 1 else y

    engine = pp.Engine(plan, group) if plan else None
    for _ in range(3):
        optimizer.zero_grad()
        if plan:
            engine.run(forward, (ROWS, WIDTH), torch.float64)
        else:
            pp.all_forward_all_backward(forward, m, (ROWS, WIDTH), torch.float64, group)
        optimizer.step()
    return {stage: [weight.detach() for weight in layers[stage].parameters()] for stage in owned}


@pytest.mark.parametrize("schedule", ["plain", *EXECUTED])
def test_layers_trained_in_stages_are_those_trained_in_one_process(pool, schedule):
    """By the plain pipeline and by the engine; the reference is the whole batch through all layers, in plain torch."""
    layers, batch, m = layers_and_batch()
    model = torch.nn.Sequential(*(module for layer in layers for module in (layer, torch.nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (model(batch).square().sum() / batch.numel()).backward()
        optimizer.step()
    ranks = STAGES if schedule == "plain" else STAGES // SCHEDULES[schedule].chunks
    trained = {stage: weights for found in pool.run(ranks, trained_in_stages, schedule=schedule)
               for stage, weights in found.items()}
    initial, *_ = layers_and_batch()
    for stage, layer in enumerate(layers):
        for found, want, before in zip(trained[stage], layer.parameters(), initial[stage].parameters(), strict=True):
            assert (found - want).abs().max() < 1e-12 < (before - want).abs().max()


def test_an_output_is_freed_at_once_and_what_is_sent_when_it_has_left(monkeypatch):
    """By the first of two ranks, which also connects to the other and back before its first step. The engine keeps the
    output's edge in the graph, not the output; and what has not left is waited for at the end."""
    sent, received, waited = [], [], []

    def send(x, peer, group):
        assert x.is_contiguous() and peer == 1
        sent.append(weakref.ref(x))
        number = len(sent) - 1  # the third one of the step is not over before its end
        return SimpleNamespace(x=x, completed=lambda: number != 3, wait=lambda: waited.append(number))

    def receive(x, peer, group):
        received.append(peer)
        return collectives.done(x.zero_())

    monkeypatch.setattr(pp, "send", send)
    monkeypatch.setattr(pp, "receive", receive)
    engine = pp.Engine(make_plan("1f1b", 2, 4))  # of a group of one rank, the first
    assert len(sent) == len(received) == len(waited) == 1
    alive, outputs, weight = [], [], torch.ones(3, 2, requires_grad=True)

    def forward(stage, k, x):
        alive.append([sum(tensor() is not None for tensor in tensors) for tensors in (outputs, sent)])
        y = (weight * k).t()
        outputs.append(weakref.ref(y))
        return y

    engine.run(forward, (2, 3), torch.float32)
    assert alive == [[0, 0], [0, 0], [0, 0], [0, 1]]
    assert waited == [0, 3] and len(sent) == 5 and received == [1] * 5


def test_a_weight_gradient_that_nobody_computes_is_noticed():
    plan, weight = make_plan("zb-h1", 1, 1), parameter(Spec("w", (2, 2)), {}, torch.float32)
    weight.data = torch.ones(2, 2)
    x, alone = torch.ones(3, 2, requires_grad=True), TensorParallel()
    without_w = plan._replace(ranks=[[action for action in plan.ranks[0] if action.op != "W"]])
    with pytest.raises(AssertionError, match="something was computed that nobody used"):
        pp.Engine(without_w).run(lambda *_: Column.apply(x, alone, MATMUL, True, weight).sum(), (), torch.float32)
    backward_weight((0, 0))
    assert weight.grad.eq(3).all()


def slept(schedule: str, m: int) -> float:
    """How long a step takes whose F, I and W of a stage take 20 ms each, in those of all stages of a rank."""
    plan = make_plan(schedule, dist.get_world_size(), m)

    @contextmanager
    def around(action):
        yield
        time.sleep(0.04 if action.op == "B" else 0.02)

    engine = pp.Engine(plan, grids.everyone(), around=around)
    for _ in range(2):  # the first backward of a process takes longer than a whole step
        dist.barrier()
        began = time.perf_counter()
        engine.run(lambda stage, k, x: 1 * (torch.ones(1, requires_grad=True) if x is None else x), (1,), torch.float32)
    return (time.perf_counter() - began) / (0.02 * plan.stages / len(plan.ranks))


@pytest.mark.timing
@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("schedule", EXECUTED)
def test_a_step_takes_as_long_as_simulated(pool, schedule, p):
    """Stages that sleep need no processor, so on two cores eight of them can be seen to wait for each other."""
    plan = make_plan(schedule, p, 2 * p)
    simulated = max(rank[-1].stop for rank in simulate(plan, Costs(*[p / plan.stages] * 3)))
    tries = []
    for _ in range(3):  # others may have used the machine
        tries.append(max(pool.run(p, slept, schedule=schedule, m=2 * p)))
        if tries[-1] < 1.1 * simulated:
            break
    assert simulated <= min(tries) < 1.1 * simulated


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_two_halves_of_a_backward_are_one(recompute):
    """In FLOPs: nothing is computed for both."""
    whole, halves = (measured_on(f"{grids.BASE} --micro-batch 24 --pp 2 --schedule {schedule} --attention math "
                                 f"--recompute {recompute}", 2, 1).flops for schedule in ("1f1b", "zb-h1"))
    assert whole == halves > 0


# ---- layers into stages ---------------------------------------------------------------------------------------------

@cache
def best(work: tuple[float, ...], stages: int, last: float) -> float:
    """The largest work of a stage at its smallest, by trying everything."""
    if stages == 1:
        return sum(work) + last
    cuts = range(1, len(work) - stages + 2)
    return min(max(sum(work[:cut]), best(work[cut:], stages - 1, last)) for cut in cuts)


@pytest.mark.parametrize("last", [0, 1, 2.4])
def test_layers_are_cut_into_stages_of_equal_work(last):
    """As equal as can be: also where dense layers are four times the work of the rest."""
    for work in (*([1] * layers for layers in range(1, 41)), [4, 4, 4, 1, 1, 1, 1, 1, 1, 1]):
        for stages in range(1, min(8, len(work)) + 1):
            cuts = costs.partition(work, stages, last)
            assert [layer for cut in cuts for layer in cut] == list(range(len(work))) and all(len(cut) for cut in cuts)
            of_stages = [sum(work[cut.start:cut.stop]) + last * (i == stages - 1) for i, cut in enumerate(cuts)]
            assert max(of_stages) == pytest.approx(best(tuple(work), stages, last))
    began = time.process_time()
    assert {len(cut) for cut in costs.partition([1.0] * 5000, 8)} == {625} and time.process_time() < began + 5
    with pytest.raises(ValueError, match="3 layers cannot be split into 4 stages: use 1 to 3"):
        costs.partition([1] * 3, 4)
