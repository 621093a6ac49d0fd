"""Replay a pipeline's lists of actions and transfers with sends that wait for their receives, as
NCCL's may."""
from collections import deque
from collections.abc import Callable

from schedules import Action, Costs, Span, Transfer, required_results


def stream_of_link(item: Action | Transfer) -> tuple | None:
    """Return the stream on which a rank runs an item if each directed pair of ranks has its own
    process group."""
    return (item.op, item.peer) if isinstance(item, Transfer) else None


def check_rendezvous(lists: list[list[Action | Transfer]]) -> None:
    """Raise ValueError, as `replay` does, if the lists block when each item waits for all items
    before it."""
    replay(lists, Costs(), lambda item: None)


def replay(lists: list[list[Action | Transfer]], costs: Costs, stream_of: Callable) -> list[list[Span]]:
    """Return when each rank runs each action, if a send and its receive run at the same time.

    stream_of(item): the stream on which a rank runs the item. A stream runs its items in order. A
    transfer also waits for the actions before it in the list. Of the transfers on other streams, an
    action waits only for those that bring its inputs. Raise ValueError if ranks wait for each other
    for ever, or if a send meets the receive of a different transfer.
    """
    stages = 1 + max((item.stage for items in lists for item in items), default=0)
    queues, free = [{} for _ in lists], [{} for _ in lists]  # stream -> items, time when it is free
    spans, known = [[] for _ in lists], [{} for _ in lists]  # known: result -> when this rank has it
    for items, streams in zip(lists, queues):
        before = 0  # how many actions are before this item
        for item in items:
            needs = required_results(item, stages) if isinstance(item, Action) else set()
            streams.setdefault(stream_of(item), deque()).append((item, needs, before))
            before += isinstance(item, Action)

    def earliest(r: int, stream, needs: set[Action], before: int) -> float | None:
        """Return when this rank can begin the first item of a stream; None if it waits for an item
        that has not run yet."""
        if len(spans[r]) < before or not needs <= known[r].keys():
            return None
        last = spans[r][before - 1].stop if before else 0.0
        return max([last, free[r].get(stream, 0.0), *(known[r][result] for result in needs)])

    def run(r: int, stream, item: Action | Transfer, needs: set[Action], before: int) -> bool:
        """Run the first item of a stream of this rank, a send together with its receive. Return
        False if it has to wait."""
        if item.op == "receive" or (start := earliest(r, stream, needs, before)) is None:
            return False
        queue, user = queues[r][stream], r
        if isinstance(item, Action):
            result, stop = item.result, start + costs.of(item.op)
            spans[r].append(Span(item, start, stop))
        else:
            user, receive = item.peer, Transfer("receive", *item[1:4], r)
            there = queues[user].get(other := stream_of(receive))
            if not there or (there[0][0][0], there[0][0][-1]) != ("receive", r):
                return False
            if there[0][0] != receive:
                raise ValueError(f"rank {r} sends {item} and rank {user} receives {there[0][0]}")
            if (ready := earliest(user, other, *there[0][1:])) is None:
                return False
            result = Action(item.what, item.stage + (1 if item.what == "B" else -1), item.micro_batch)
            free[user][other] = stop = max(start, ready) + costs.hop
            there.popleft()
        known[user][result] = free[r][stream] = stop
        queue.popleft()
        return True

    moved = True
    while moved:
        moved = False
        for r, streams in enumerate(queues):
            for stream, queue in streams.items():
                while queue and run(r, stream, *queue[0]):
                    moved = True
    waiting = [[queue[0][0] for queue in streams.values() if queue] for streams in queues]
    if any(waiting):
        raise ValueError("ranks wait for each other: " + ", ".join(
            f"rank {r} cannot start {items[0]}" for r, items in enumerate(waiting) if items))
    return spans
