"""Bugs planted on purpose: each must make the test named beside it fail. `pytest -m mutants` prints how many do.

A mutant is one passage of a source file, replaced; the test runs on a copy of the project. Each is a way in which
parallel training has silently gone wrong somewhere.
"""
import os
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest

import config

ROOT = os.path.dirname(config.__file__)


class Mutant(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    killer: str  # the test that must fail, as pytest names it


GRID_2 = "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch 6]"
TIED = "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch 6 --tied --bucket-mb 0.05]"
PIECES = "tests/test_cp.py::test_attention_in_pieces_equals_attention_at_once[{}-{}-{}-{}]"
CP_2 = "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch 12 --cp 2]"
PP_2 = "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch {}]"
END_TO_END = "tests/test_train.py::test_every_grid_trains_evaluates_and_samples_as_one_process"
TP_2 = "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch 12 --tp 2]"
TP_2_WHOLE = "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch 12 --tp 2 --no-sp --tied]"
KV_2 = "tests/test_grids.py::test_a_grid_equals_one_process[4 ranks --micro-batch 12 --tp 4 --kv-heads 2]"

MUTANTS = [
    Mutant("first values from the local shard's shape", "param.py",
           "values = torch.randn((min(block, spec.shape[0] - first), *spec.shape[1:]), generator=generator)",
           "values = torch.randn((min(block, spec.shape[0] - first), *shape_of(box)[1:]), generator=generator); "
           "others = [slice(None)] * len(others)",
           "tests/test_param.py::test_first_values_do_not_depend_on_the_grid[columns]"),
    Mutant("every parameter drawn from the same stream", "param.py",
           'f"{seed} {spec.name} {first}"', 'f"{seed} {first}"',
           "tests/test_param.py::test_values_are_drawn_as_asked_for_in_blocks_of_rows"),
    Mutant("mean of means over ranks", "train.py",
           'counted = collectives.all_reduce(valid, groups["data"], async_op=True)',
           'counted = collectives.Pending(None); valid = valid * size(groups["data"])', GRID_2),
    Mutant("mean of means over micro-batches", "train.py",
           "return optimizer.scaled(y / valid.clamp(min=1))",
           "return y / (batch.labels != IGNORED).sum().clamp(min=1) / len(micro_batches)",
           "tests/test_grids.py::test_a_grid_equals_one_process[1 ranks --micro-batch 8]"),
    Mutant("a norm that counts replicas twice", "zero.py",
           "and (self.stage > 0 or rank(self.group) == 0)", "", GRID_2),
    Mutant("decay on norms", "model.py",
           "return Spec(name, (width,), along, mean=1.0, decay=False)", "return Spec(name, (width,), along, mean=1.0)",
           GRID_2),
    Mutant("a clip that reports and scales nothing", "zero.py",
           "bucket.owned_grad.mul_(", "bucket.owned_grad.mul(",
           "tests/test_zero.py::test_clipping_scales_the_whole_gradient_to_the_limit"),
    Mutant("label shifted twice", "data.py",
           "tokens[:, 1:].contiguous())", "tokens[:, 1:].roll(-1, 1))",
           "tests/test_data.py::test_labels_are_the_tokens_one_place_further"),
    Mutant("other samples in every process", "data.py",
           'f"{self.seed} {epoch}"', 'f"{self.seed} {epoch} {__import__(\'os\').getpid()}"',
           "tests/test_data.py::test_every_process_reads_the_same_samples"),
    Mutant("ranks that read each other's samples", "data.py",
           "range(first, first + global_batch, micro_batch * dp)]", "range(first, first + global_batch, micro_batch)]",
           "tests/test_data.py::test_ranks_share_a_step_and_the_stream_does_not_know_how_many_there_are"),
    Mutant("positions that run on through documents", "data.py",
           "batch.positions = places - ", "batch.positions = places - 0 * ",
           "tests/test_data.py::test_documents_and_positions_begin_anew_at_every_separator"),
    Mutant("documents that see each other", "model.py",
           "mask = mask & (documents", "mask = mask | (documents",
           "tests/test_model.py::test_a_packed_batch_equals_separate_documents"),
    Mutant("gradients accumulated in bf16", "dp.py",
           "self.wide = at_least_fp32(self.params[0].dtype)",
           "self.wide = self.params[0].dtype", "tests/test_zero.py::test_1024_bf16_gradients_add_up"),
    Mutant("no master weights", "zero.py",
           "self.shard.copy_(self.master)", "self.shard.copy_(self.master); self.master.copy_(self.shard)",
           "tests/test_zero.py::test_small_steps_move_bf16_weights"),
    Mutant("rotary angles in bf16", "param.py",
           "return torch.promote_types(dtype, torch.float32)", "return dtype",
           "tests/test_model.py::test_angles_norms_and_loss_are_exact_in_bf16_runs"),
    Mutant("deferred gradients with autograd on", "param.py",
           "@torch.no_grad()  # autograd is not running here", "# autograd is not running here",
           "tests/test_param.py::test_weight_gradients_wait_until_they_are_asked_for"),
    Mutant("ready before the weight gradient is there", "param.py",
           "if not any(param is other for params in queued for other in params):", "if True:",
           "tests/test_param.py::test_weight_gradients_wait_until_they_are_asked_for"),
    Mutant("parameters that share a version counter", "zero.py",
           "param.data = self.view(self.weights, param)",
           "twin = nn.Parameter(self.view(self.weights, param)); twin.__dict__.update(param.__dict__); "
           "torch.utils.swap_tensors(param, twin)",
           "tests/test_zero.py::test_refilling_the_flat_weights_between_forward_and_backward_is_no_modification"),
    Mutant("reduction after the first micro-batch", "dp.py",
           "if self.expected == 0:\n            self.launch()",
           "if self.expected % len(self.params) == 0 and not self.pending.works:\n            self.launch()",
           "tests/test_dp.py::test_a_bucket_is_sent_by_its_last_gradient_before_backward_ends"),
    Mutant("a reduction for every micro-batch", "dp.py",
           "if self.expected == 0:\n            self.launch()",
           "if self.expected % len(self.params) == 0:\n            self.launch()",
           "tests/test_dp.py::test_a_step_sends_2P_once_whatever_the_micro_batches[2-2]"),
    Mutant("a tied table that expects two gradients a backward", "dp.py",
           "for param in dict.fromkeys(param for unit in units for param in unit.parameters()):",
           "for param in (param for unit in units for param in unit.parameters()):", TIED),
    Mutant("a shared table not alone in its bucket", "dp.py",
           'if owners[param] > 1 or "tie" in param.spec.along:', 'if "tie" in param.spec.along:',
           "tests/test_dp.py::test_what_is_shared_or_different_is_apart"),
    Mutant("terms that are never summed over their axis", "dp.py",
           "for axis in spec.sums:", "for axis in ():",
           "tests/test_dp.py::test_terms_are_summed_over_their_axis_and_copies_are_not"),
    Mutant("copies treated as terms", "dp.py",
           "for axis in spec.sums:", "for axis in spec.copies:",
           "tests/test_dp.py::test_terms_are_summed_over_their_axis_and_copies_are_not"),
    Mutant("a reduction into a copy", "collectives.py",
           'assert x.is_contiguous(), "the result would be written to a copy"', "x = x.contiguous()",
           "tests/test_collectives.py::test_a_result_is_never_written_to_a_copy"),
    Mutant("a gather whose backward keeps only the own part", "collectives.py",
           "return scattered_sum(grad, ctx.dim, ctx.group), None, None",
           "return grad.chunk(size(ctx.group), ctx.dim)[rank(ctx.group)], None, None",
           "tests/test_collectives.py::test_every_pair_is_the_derivative_of_the_other[2]"),
    Mutant("f without its all-reduce", "collectives.py",
           "return summed(grad, ctx.group), None", "return grad, None",
           "tests/test_collectives.py::test_every_pair_is_the_derivative_of_the_other[2]"),
    Mutant("a step that is not finite taken all the same", "zero.py",
           "found_inf = (~norm.isfinite()).float()", "found_inf = (norm < 0).float()",
           "tests/test_zero.py::test_a_step_that_is_not_finite_changes_nothing[1.0-nan-adamw]"),
    Mutant("padding that is not equal parts", "zero.py",
           "self.padded = -(-self.numel // n) * n if self.stage else self.numel", "self.padded = self.numel",
           "tests/test_grids.py::test_a_grid_equals_one_process[3 ranks --micro-batch 4 --zero 1 --bucket-mb 0.05]"),
    Mutant("a last rank whose shard is never updated", "zero.py",
           "flats = (self.master, self.owned_grad, m, v) if",
           "self.owned_grad[:] *= rank(self.group) < size(self.group) - 1 or size(self.group) == 1; "
           "flats = (self.master, self.owned_grad, m, v) if",
           "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch 6 --zero 1]"),
    Mutant("only the last micro-batch's gradient kept", "zero.py",
           "self.owned_grad.add_(self.arriving)", "self.owned_grad.copy_(self.arriving)",
           "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch 6 --zero 2]"),
    Mutant("replicas of shards that are never summed", "zero.py",
           'all_reduce(self.owned_grad, self.groups["replicate"])', "pass",
           "tests/test_grids.py::test_a_grid_equals_one_process[4 ranks --micro-batch 3 --zero 1 --dp-replicate 2]"),
    Mutant("a norm that counts replicas of shards twice", "zero.py",
           'rank(self.groups["replicate"]) == 0 and (', "(",
           "tests/test_grids.py::test_a_grid_equals_one_process[4 ranks --micro-batch 3 --zero 1 --dp-replicate 2]"),
    Mutant("decay by the place in the shard instead of the whole", "zero.py",
           "parts = [[self.owned(flat, start, stop) for start, stop in spans] for flat in flats]",
           "parts = [[flat[start:stop] for start, stop in spans] for flat in flats]",
           "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch 6 --zero 1]"),
    Mutant("a reduction that nobody waits for", "zero.py",
           "        self.pending.wait()\n        if self.arriving", "        if self.arriving",
           "tests/test_zero.py::test_every_collective_is_waited_for_before_its_tensors_are_used[2]"),
    Mutant("weights used before they are there", "zero.py",
           "        self.fetch()\n        self.gathering.wait()", "        self.fetch()",
           "tests/test_zero.py::test_every_collective_is_waited_for_before_its_tensors_are_used[3]"),
    Mutant("weights that are never freed", "zero.py",
           "if self.stage == 3 and self.users == 0:", "if False:",
           "tests/test_zero.py::test_live_bytes_are_those_of_the_formula[3-dtype0-auto]"),
    Mutant("weights gathered in backward a second time for the last unit", "zero.py",
           "if goes_back and unit is self.last:", "if False:",
           "tests/test_zero.py::test_elements_sent_are_those_of_the_stage[1-2]"),
    Mutant("whole gradients that stay at stage 2", "zero.py",
           "self.grad, self.in_flight[:] = None, [self]",
           "self.in_flight[:] = [self]; self.grad = self.grad.clone().zero_()",
           "tests/test_zero.py::test_live_bytes_are_those_of_the_formula[2-dtype0-auto]"),
    Mutant("gradients of fp16 runs that stay scaled", "zero.py",
           "bucket.owned_grad.mul_(clip * unscale)", "bucket.owned_grad.mul_(clip)",
           "tests/test_zero.py::test_fp16_takes_the_step_of_fp32[0.0]"),
    Mutant("a loss scale that never grows", "zero.py",
           "found_inf, 2.0, 0.5, self.interval)", "found_inf, 1.0, 0.5, self.interval)",
           "tests/test_zero.py::test_the_loss_scale_follows_the_rule_of_torch"),
    Mutant("a checkpoint of another rank's part", "recompute.py",
           "self.parts[slot].copy_(x.reshape(size(self.group), -1)[rank(self.group)])",
           "self.parts[slot].copy_(x.reshape(size(self.group), -1)[0])",
           "tests/test_recompute.py::test_checkpoints_are_shared_and_gathered_once_a_layer[2]"),
    Mutant("norms whose terms are not summed under sequence parallelism", "model.py",
           'how = "sum" if self.tp.sequence else "copy"', 'how = "copy"', TP_2),
    Mutant("norms summed though each rank has the whole gradient", "model.py",
           'how = "sum" if self.tp.sequence else "copy"', 'how = "sum"', TP_2_WHOLE),
    Mutant("keys and values of a shared head not summed", "model.py",
           'kv = {"kv": 0, "kv_copy": "sum"}', 'kv = {"kv": 0, "kv_copy": "copy"}', KV_2),
    Mutant("head norms that see only their rank's heads", "model.py",
           'D, {"tp": "sum"})) for part in', 'D, {"tp": "copy"})) for part in',
           "tests/test_grids.py::test_a_grid_equals_one_process[2 ranks --micro-batch 12 --tp 2 --qk-norm --qkv-bias "
           "--recompute selective --z-loss 0.01]"),
    Mutant("a loss with the largest logit of the own part", "tp.py",
           "        all_reduce(largest, group, MAX)\n", "",
           "tests/test_tp.py::test_the_loss_and_its_gradient_equal_the_dense_ones[97-2]"),
    Mutant("labels of other ranks' vocabulary looked up", "tp.py",
           "wide.gather(-1, index[:, None])[:, 0] * mine", "wide.gather(-1, index[:, None])[:, 0]",
           "tests/test_tp.py::test_the_loss_and_its_gradient_equal_the_dense_ones[97-2]"),
    Mutant("ignored labels that count", "tp.py",
           "counts = (labels != IGNORED).to(wide.dtype)", "counts = torch.ones_like(total)",
           "tests/test_tp.py::test_the_loss_and_its_gradient_equal_the_dense_ones[97-1]"),
    Mutant("tokens of other ranks' table given rows", "tp.py",
           "return start_sum(table[rows].mul_(mine[:, None]), tp)()", "return start_sum(table[rows], tp)()",
           "tests/test_tp.py::test_a_table_of_any_size_is_shared[97-2]"),
    Mutant("a column layer's gradient from the own tokens", "tp.py",
           "whole = arriving() if arriving else start_gather(local, tp)()",
           "whole = local.repeat(len(grad) // len(local), 1)",
           "tests/test_tp.py::test_a_pair_of_matrices_equals_the_dense_one[True-False-2]"),
    Mutant("dX that is not summed", "tp.py",
           "            dx = start_sum(terms, tp)\n", "            dx = lambda: terms if not tp.sequence else "
           "start_sum(terms, tp)()\n",
           "tests/test_tp.py::test_a_pair_of_matrices_equals_the_dense_one[False-False-2]"),
    Mutant("a gather that hides under nothing", "tp.py",
           "        if tp.ring:\n            dx = summed_product(grad, matrix, tp)\n        else:\n",
           "        if tp.ring:\n            dx = summed_product(grad, matrix, tp)\n        else:\n"
           "            _ = arriving and arriving()\n",
           "tests/test_tp.py::test_every_message_of_a_column_parallel_backward_hides_under_a_matmul"),
    Mutant("a layer that runs again with its last sum", "model.py",
           "self.w_down, tp, skip=again)", "self.w_down, tp)",
           "tests/test_tp.py::test_a_layer_sends_what_the_papers_say"),
    Mutant("a result kept that could be computed again", "model.py",
           "return row(both, self.w_down, tp, before=SwiGLU.apply)", "return row(SwiGLU.apply(both), self.w_down, tp)",
           "tests/test_tp.py::test_a_rank_keeps_what_the_formula_says[2--auto-selective]"),
    Mutant("replicas and shards exchanged", "train.py",
           '"replicate": (replicate,), "dp": (shard, cp)', '"replicate": (shard,), "dp": (replicate, cp)',
           "tests/test_train.py::test_neighbours_share_layers_then_shards_and_replicas_are_far_apart"),
    Mutant("results of pieces merged in the dtype of the run", "cp.py",
           "wide = dict(dtype=at_least_fp32(q.dtype), device=q.device)", "wide = dict(dtype=q.dtype, device=q.device)",
           "tests/test_cp.py::test_errors_in_bf16_stay_those_of_one_rank"),
    Mutant("a merge that overflows", "cp.py",
           "old_lse.sub_(F.logsigmoid(old_lse - new_lse))", "old_lse.add_((1 + (new_lse - old_lse).exp()).log())",
           PIECES.format("ring", "flash", 1000.0, False)),
    Mutant("rows that see nothing of a piece, merged", "cp.py",
           "if piece.blind is not None:", "if False:", PIECES.format("ring", "flash", 1.0, True)),
    Mutant("halves of the ring exchanged", "cp.py",
           "Piece(own, first) if (i - t) % c < i else Piece(second, own)",
           "Piece(own, first) if (i - t) % c > i else Piece(second, own)",
           "tests/test_cp.py::test_pieces_cover_every_visible_score_once_and_work_is_equal[4-ring]"),
    Mutant("backward of a piece from its own logsumexp", "cp.py",
           "    rows, columns = piece.rows, piece.columns\n    shares = ",
           "    rows, columns = piece.rows, piece.columns\n    o, lse = o.clone(), lse.clone()\n"
           "    o[:, :, rows], lse[:, :, rows] = block.forward(q[:, :, rows], k[:, :, columns], v[:, :, columns], "
           "piece.causal and piece.mask is None, piece.mask)\n    shares = ",
           PIECES.format("ring", "flash", 1.0, False)),
    Mutant("gradients of keys that do not come home", "cp.py",
           "        home += arrived\n", "", PIECES.format("ring", "flash", 1.0, False)),
    Mutant("gradients of keys that start anew at every hop", "cp.py",
           "            dkv += arrived ", "            pass ", PIECES.format("ring", "flash", 1.0, False)),
    Mutant("positions counted on each rank", "cp.py",
           "mine if positions is None else positions, documents)",
           "torch.arange(len(mine)) if positions is None else positions, documents)", CP_2),
    Mutant("labels shifted after the cut", "cp.py",
           "F.pad(labels, (0, more), value=IGNORED)[:, mine],", "F.pad(tokens, (0, more))[:, mine].roll(-1, 1),",
           "tests/test_cp.py::test_every_token_is_at_one_place[2-1-48]"),
    Mutant("padding in the last document", "cp.py",
           ".expand(-1, more) + 1), 1)", ".expand(-1, more)), 1)",
           "tests/test_cp.py::test_padding_is_a_document_of_its_own"),
    Mutant("documents that see each other under context parallelism", "cp.py",
           "    if documents is None:\n        return pieces\n", "    return pieces\n",
           PIECES.format("allgather", "flash", 1.0, True)),
    Mutant("plain cuts for tokens, zig-zag ones for attention", "cp.py",
           "return chunks[[i, 2 * c - 1 - i]].flatten()", "return chunks[[2 * i, 2 * i + 1]].flatten()", CP_2),
    Mutant("kv heads repeated before they travel", "cp.py",
           "going_round(torch.stack((k, v)), group), pieces",
           "going_round(torch.stack((k, v)).repeat_interleave(q.shape[1] // k.shape[1], 2), group), pieces",
           "tests/test_cp.py::test_bytes_sent_are_those_of_the_table[ring-4]"),
    Mutant("the sum of gathered keys' gradients", "cp.py",
           "reduce_scatter(out, part, group)", "out.copy_(part.chunk(size(group))[rank(group)])",
           PIECES.format("allgather", "flash", 1.0, False)),
    Mutant("Ulysses in the order of the ranks", "cp.py",
           "whole = chunks[:, :, order].flatten(2, 3)", "whole = chunks.flatten(2, 3)",
           PIECES.format("ulysses", "flash", 1.0, False)),
    Mutant("kv heads in another order than their queries", "cp.py",
           "x.repeat_interleave(copies, 1) for x in (k, v)", "x.repeat(1, copies, 1, 1) for x in (k, v)",
           PIECES.format("ulysses", "flash", 1.0, False)),
    Mutant("a ring that waits before it computes", "cp.py",
           "        yield kv\n        if travelling:\n            travelling.wait()\n",
           "        if travelling:\n            travelling.wait()\n        yield kv\n        if travelling:\n",
           "tests/test_cp.py::test_keys_travel_while_those_before_them_are_used"),
    Mutant("tokens counted without context parallel ranks", "train.py",
           '"data": (replicate, shard, cp)', '"data": (replicate, shard)', CP_2),
    Mutant("gradients of context parallel ranks left apart", "train.py",
           '"dp": (shard, cp)', '"dp": (shard,)', CP_2),
    Mutant("receives that are issued before everything else", "schedules.py",
           'lists[peer].append(Transfer("receive"', 'lists[peer].insert(0, Transfer("receive"',
           "tests/test_pp.py::test_everything_happens_once_in_order_and_nobody_waits_for_ever[1f1b]"),
    Mutant("one buffer for all that is received", "pp.py",
           "                    x = torch.empty(shape, dtype=dtype, device=self.device)\n",
           '                    x = self.__dict__.setdefault("buffer", torch.empty(shape, dtype=dtype)).detach()\n',
           PP_2.format("6 --pp 2 --schedule afab --tied")),
    Mutant("weights' halves counted as backwards", "schedules.py",
           'if action.op in "BI"))', 'if action.op in "BIW"))',
           PP_2.format("12 --pp 2 --schedule zb-h1 --tied --recompute selective")),
    Mutant("layers that no stage has", "pp.py",
           "if stage else left\n", "\n", "tests/test_pp.py::test_layers_are_cut_into_stages_of_equal_work[0-0]"),
    Mutant("a tied table's two gradients apart", "model.py",
           '{"tie": "sum"}', '{"tie": "copy"}',
           "tests/test_grids.py::test_a_grid_equals_one_process[3 ranks --micro-batch 24 --pp 3 --tied]"),
    Mutant("a loss that only the last stage knows", "train.py",
           '    for axis in ("data", "pp"):  # one pipeline rank has it, the others zeros\n',
           '    for axis in ("data",):\n',
           PP_2.format("12 --pp 2")),
    Mutant("an evaluation that only the last stage knows", "train.py",
           '    for axis in ("data", "pp"):\n', '    for axis in ("data",):\n', END_TO_END),
    Mutant("outputs kept after they were sent", "pp.py",
           "alive[stage, k] = x, torch.autograd.graph.get_gradient_edge(y)",
           "alive[stage, k] = x, torch.autograd.graph.get_gradient_edge(y); self.items = self.items; "
           "self.__dict__.setdefault('kept', []).append((x, y))",
           "tests/test_pp.py::test_bytes_alive_at_every_action_are_the_plans[1f1b]"),
    Mutant("a W that follows its I at once", "schedules.py",
           "            if lag and i >= lag(r):\n                order.append(Action(\"W\", *backwards[i - lag(r)]))",
           "            if lag:\n                order.append(Action(\"W\", *backwards[i]))",
           "tests/test_pp.py::test_four_ranks_as_drawn_by_hand[zb-h1]"),
    Mutant("a backward that is not split", "pp.py",
           'if op == "I":\n                    backward_input((stage, k), edge, grad)',
           'if op == "I":\n                    import param; param._queue[stage, k] = {}\n'
           "                    torch.autograd.backward(edge, grad)",
           "tests/test_pp.py::test_a_step_takes_as_long_as_simulated[zb-h1-4]"),
    Mutant("a cut of the layers without the head's work", "train.py",
           "last=2 * model.vocab * model.hidden / layer)", "last=0.0)",
           "tests/test_train.py::test_the_head_counts_as_layers"),
    Mutant("a rate that ignores the schedule", "train.py",
           "norm = optimizer.step(lr)", "norm = optimizer.step(optim.lr)",
           "tests/test_train.py::test_the_optimizer_gets_the_schedules_rate"),
    Mutant("ranks that sample nothing", "train.py",
           'holds_a_part = rank(groups["data"]) == 0 or settings.grid.zero == 3', "holds_a_part = chief", END_TO_END),
    Mutant("an evaluation of the first round alone", "train.py",
           "share(unseen, first, at_once, settings, groups, wanted)",
           "share(unseen, 0, at_once, settings, groups, wanted)",
           "tests/test_train.py::test_an_evaluation_in_rounds_is_one_over_everything"),
    Mutant("bytes of a hybrid divided by all ranks", "train.py",
           "bytes_held(buckets, grid.zero, shards, dtype, moments)",
           "bytes_held(buckets, grid.zero, grid.dp, dtype, moments)",
           "tests/test_train.py::test_the_first_lines_count_what_a_rank_holds"),
    Mutant("an evaluation that frees nothing", "zero.py",
           "        self.free(unit)\n        return Enter",
           "        if torch.is_grad_enabled():\n            self.free(unit)\n        return Enter",
           "tests/test_zero.py::test_an_evaluation_leaves_no_gathered_weights"),
    Mutant("clipping by the norm of scaled gradients", "zero.py",
           "clip = (self.clip / (norm + 1e-6))", "clip = (self.clip / (norm / unscale + 1e-6))",
           "tests/test_zero.py::test_fp16_takes_the_step_of_fp32[0.1]"),
    Mutant("a backward that waits for every sum", "zero.py",
           "self.pending = reduce_scatter(self.owned_grad, self.grad, self.group, async_op=True)",
           "self.pending = reduce_scatter(self.owned_grad, self.grad, self.group)",
           "tests/test_zero.py::test_gradients_are_reduced_while_backward_goes_on[1]"),
    Mutant("a step count that stays behind", "zero.py",
           'return {"steps": self.steps} | (', 'return {} | (',
           "tests/test_zero.py::test_state_leaves_one_grid_and_enters_another[]"),
    Mutant("sampling that restarts its positions", "model.py",
           "before = cache.count(self.stages[stage][0]) if cache is not None else 0", "before = 0",
           "tests/test_model.py::test_sampling_with_the_cache_equals_sampling_without[" +
           "--layers 2 --hidden 48 --heads 6 --kv-heads 3 --head-dim 10 --ffn 56 --vocab 61]"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_still_has_its_passage_and_its_test(mutant):
    with open(os.path.join(ROOT, mutant.file)) as file:
        assert file.read().count(mutant.old) == 1
    file, name = mutant.killer.split("::")
    with open(os.path.join(ROOT, file)) as tests:
        assert f"def {name.split('[')[0]}(" in tests.read()


@pytest.mark.mutants
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutant_is_killed(mutant, tmp_path):
    copy = tmp_path / "project"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    file = copy / mutant.file
    source = file.read_text()
    assert source.count(mutant.old) == 1, f"the passage to replace occurs {source.count(mutant.old)} times"
    mutated = source.replace(mutant.old, mutant.new)
    compile(mutated, mutant.file, "exec")  # a bug, not a typing error
    file.write_text(mutated)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", mutant.killer]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=900,
                          env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"})
    assert "1 failed" in done.stdout, f"survived {mutant.killer}:\n{done.stdout[-2000:]}"
