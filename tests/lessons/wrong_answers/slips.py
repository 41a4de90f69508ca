"""Wrong answers that are the reference with a few words changed: what each must be told, and the changes.

A change is what the reference says in one place, and what the learner has written instead.
"""

# ruff: noqa: E501

SLIPS = {
    "accumulate": [
        (
            "the sum over micro-batches, not their mean",
            ("aims) / len(batches)", "aims)"),
            ("targets) / len(batches)", "targets)"),
        ),
        ("DDP sent the gradients 4 times, expected once", ("with model.no_sync():", "if True:")),
        (
            "this rank's alone: nothing was sent",
            ("    loss = mse_loss(model(inputs)", "    with model.no_sync():\n        loss = mse_loss(model(inputs)"),
        ),
        (
            "`weight.grad[0, 0]` is",
            ("    loss = mse_loss(model(inputs)", "    model.zero_grad()\n    loss = mse_loss(model(inputs)"),
        ),
    ],
    "average_gradients": [
        ("summed, not averaged?", ("parameter.grad /= dist.get_world_size()", "pass")),
        ("1.5 times what it should be", ("parameter.grad /= dist.get_world_size()", "parameter.grad /= 2")),
        (
            "nothing has changed it",
            ("all_reduce(parameter.grad)", "all_reduce(parameter.grad.clone())"),
            ("parameter.grad /= dist.get_world_size()", "pass"),
        ),
        (
            "a hang: rank 0 waits in all_reduce for the other ranks",
            ("is not None:", "is not None and dist.get_rank() == 0:"),
        ),
        ("`0.bias.grad[0]` is", ("is not None:", "is not None and parameter.dim() > 1:")),
    ],
    "average_in_buckets": [
        ("called all_reduce 6 times, expected 2", ("if size > room:", "if True:")),
        ("a bucket holds 520 B, expected 400 B at most", ("if size > room:", "if not buckets:")),
        ("nothing has changed it", ("in buckets:", "in buckets[:-1]:")),
        ("summed, not averaged?", ("flat /= dist.get_world_size()", "pass")),
        ("a bucket holds", ("if size > room:", "if room <= 0:")),
        ("nothing has changed it", ("gradient.copy_(mean.view_as(gradient))", "gradient = mean.view_as(gradient)")),
        ("backward makes the last gradient first", ("reversed(list(model.parameters()))", "model.parameters()")),
    ],
    "backward_by_blocks": [
        (
            "B were kept for the backward pass at once",
            ("with torch.no_grad():", "if True:"),
            ("inputs.append(x)", "x = x.requires_grad_()\n            inputs.append(x)"),
        ),
        ("dropout has dropped other numbers the second time", ("torch.set_rng_state(states.pop())", "states.pop()")),
        ("that is the gradient of the last block's output", ("gradient = given.grad", "pass")),
        (
            "expected the parameter's gradient",
            (
                "blocks[len(inputs)](given).backward(gradient)",
                "given.grad, = torch.autograd.grad(blocks[len(inputs)](given), given, gradient)",
            ),
        ),
        ("`x` was changed", ("inputs.append(x)", "inputs.append(x.clone())"), ("x = block(x)", "x.copy_(block(x))")),
    ],
    "balancing_loss": [
        ("f of this rank's tokens only", ("dist.all_reduce(load)", "pass")),
        ("f was divided by this rank's tokens, and counts those of all", ("load / load.sum()", "load / len(logits)")),
        ("f is to be a share of the tokens, not their number", ("load / load.sum()", "load")),
        ("and not yet times their number", ("return probabilities.shape[1] * ", "return ")),
        ("f counts the likeliest", ("load / load.sum() * probabilities.mean(0)", "probabilities.mean(0).square()")),
        ("the loss has no gradient", ("logits.softmax(1)", "logits.detach().softmax(1)")),
    ],
    "batch_norm_statistics": [
        (
            "are two large numbers subtracted?",
            ("(means - mean).square()", "means.square()"),
            ("return mean, variance", "return mean, variance - mean.square()"),
        ),
        ("the mean of the ranks' means", ("(rows * means).sum(0) / rows.sum()", "means.mean(0)")),
        ("it misses how far their means lie apart", ("variances + (means - mean).square()", "variances")),
        ("divided by one row less", (".square())).sum(0) / rows.sum()", ".square())).sum(0) / (rows.sum() - 1)")),
        (
            "the square of the mean is to be taken off",
            ("return mean, variance", "return mean, variance + mean.square()"),
        ),
        ("over this rank's rows only", ("dist.all_gather(gathered, own)", "gathered = [own]")),
    ],
    "begin_saving": [
        ("that is the state of a later step", ("copy.deepcopy(state)", "state")),
        ("that is the state of a later step", ("copy.deepcopy(state)", "dict(state)")),
        (
            "that is the state of a later step",
            ("copy.deepcopy(state)", '{**state, "model": copy.deepcopy(state["model"])}'),
        ),
        (
            "that is the state of a later step",
            ("write, step, copy.deepcopy(state)", "lambda: write(step, copy.deepcopy(state))"),
        ),
        ("began a save without waiting for the result of the one before", ("previous.result()", "pass")),
        ("and no error was raised", ("previous.result()", "previous.exception()")),
    ],
    "broadcast_tree": [
        ("calls dist.send with rank 3, but the ranks are 0 … 2", ("if rank + distance < world_size:", "if True:")),
        ("nothing has changed it", ("dist.recv(tensor,", "dist.recv(tensor.clone(),")),
        (
            "calls dist.broadcast, which this exercise does not allow; it allows",
            ("dist.send(tensor, rank + distance)", "dist.broadcast(tensor, 0)"),
            ("dist.recv(tensor, rank - distance)", "dist.broadcast(tensor, 0)"),
        ),
        ("waits in send for rank", ("dist.recv(tensor, rank - distance)", "dist.send(tensor, rank - distance)")),
    ],
    "bubble": [
        ("that is waiting over working, not over the whole", ("(micro_batches + stages - 1)", "micro_batches")),
        ("that is the share in which it works", ("return (stages - 1)", "return micro_batches")),
        ("one tick too many waited", ("return (stages - 1)", "return stages")),
        ("it is 0.75, expected 0.3333", ("(micro_batches + stages - 1)", "stages")),
    ],
    "bytes_per_rank": [
        (
            "a stage below 3 shards only some",
            ("zero_stage >= 1", "True"),
            ("zero_stage >= 2", "True"),
            ("zero_stage >= 3", "True"),
        ),
        ("divide all three", ("parameters / (tp * pp)", "parameters")),
        (
            "a stage includes those before it",
            ("zero_stage >= 1", "zero_stage == 1"),
            ("zero_stage >= 2", "zero_stage == 2"),
            ("zero_stage >= 3", "zero_stage == 3"),
        ),
        (
            "and the weights last",
            ("state / (dp if zero_stage >= 1", "state / (dp if zero_stage >= 4 - 1"),
            ("weight / (dp if zero_stage >= 3", "weight / (dp if zero_stage >= 1"),
        ),
        ("is divided by dp", ("zero_stage >= 1", "False"), ("zero_stage >= 2", "False"), ("zero_stage >= 3", "False")),
    ],
    "checkpoint_interval": [
        ("how often does one of all machines fail?", ("machine_mtbf_s / machines", "machine_mtbf_s")),
        ("that is without what is trained again", (" + interval_s / (2 * between_failures_s)", "")),
        (
            "returned a float, expected (interval_s, lost)",
            ("return interval_s, save_s / interval_s + interval_s / (2 * between_failures_s)", "return interval_s"),
        ),
        (
            "a failure loses half of the interval, not all of it",
            ("2 * save_s", "save_s"),
            ("(2 * between_failures_s)", "between_failures_s"),
        ),
        ("saving a little more often loses less", ("math.sqrt(2 * save_s * between_failures_s)", "between_failures_s")),
    ],
    "choose_by_bias": [
        ("chosen by the scores without the bias", ("(scores + bias).topk", "scores.topk")),
        ("the bias has a part in the gates", ("gates = scores.gather", "gates = (scores + bias).gather")),
        ("which do not add up to 1 yet", ("gates / gates.sum(1, keepdim=True)", "gates")),
        ("by the choices of this rank only", ("dist.all_reduce(load)", "pass")),
        ("the popular go up, the others down", ("bias + speed", "bias - speed")),
        ("moved by the difference, not by its sign", (".sign()", "")),
        (
            "`bias` was changed",
            ("bias + speed * (load.mean() - load).sign()", "bias.add_(speed * (load.mean() - load).sign())"),
        ),
    ],
    "f_and_g": [
        ("who adds up backward?", ("total = gradient.clone()", "return gradient")),
        ("g's gradient was added up", ("return gradient", "return F.backward(ctx, gradient)")),
        ("this rank's hidden units only: who adds up?", ("total = x.clone()", "return x.view_as(x)")),
        ("f all-reduces forward", ("return F.apply, G.apply", "return G.apply, F.apply")),
        ("returned no pair of functions, (f, g)", ("return F.apply, G.apply", "return F.apply")),
    ],
    "flops_utilization": [
        ("attention is missing, which has no weights of its own", (" + 12 * depth * width * sequence", "")),
        ("that is the forward pass alone", ("6 * weights + 12 *", "2 * weights + 4 *")),
        ("backward costs twice as much as forward", ("6 * weights + 12 *", "4 * weights + 8 *")),
        ("a multiplication and an addition are two", ("6 * weights + 12 *", "3 * weights + 6 *")),
        ("of all devices, not of one", ("(devices * peak_flops)", "peak_flops")),
    ],
    "four_steps": [
        ("the pieces are computed one after another", ("threads.map(", "map(")),
        (
            "is None: backward does not reach the original's weights",
            ("functional_call(module, own, (piece.to(device),))", "module(piece)"),
        ),
        ("only the first piece's gradient has come", ("tensor.to(device, copy=True)", "tensor.detach().clone()")),
        ("`outputs` is [tensor(", ("torch.cat([output.to(inputs.device) for output in outputs])", "outputs")),
        ("the pieces are in another order", ("for output in outputs", "for output in reversed(outputs)")),
        (
            "`network` itself was called",
            ("[copy.deepcopy(network) for _ in pieces]", "[network, *(copy.deepcopy(network) for _ in pieces[1:])]"),
        ),
        (
            "`network.sums[0]` is 0",
            ("copies = [tensors]", "copies = [{name: tensor.clone() for name, tensor in tensors.items()}]"),
        ),
        ("`outputs` has shape (4, 2), expected (6, 2)", ("inputs.chunk(len(devices))", "inputs.split(len(devices))")),
        ("`outputs` has shape (12, 2), expected (6, 2)", ("inputs.chunk(len(devices))", "[inputs] * len(devices)")),
    ],
    "listen_for_stop": [
        ("had been told", ("dist.all_reduce(flag)", "pass")),
        ("SIGUSR1 came in step 0, and nothing handled it", ("signal.SIGTERM, signal.SIGUSR1", "signal.SIGTERM,")),
        (
            "after step 2 it is False, expected True: rank 1 had been told",
            ("dist.all_reduce(flag)", "dist.all_reduce(flag, dist.ReduceOp.MIN)"),
        ),
        ("a hang: rank", ("dist.all_reduce(flag)", "told and dist.all_reduce(flag)")),
        (
            "communicates in the handler, where the other ranks do not",
            ("told.append(number)", "dist.all_reduce(torch.tensor(1))"),
        ),
        ("left by exit()", ("told.append(number)", "exit()")),
        ("returned a Tensor, expected True or False", ("flag.item() > 0", "flag > 0")),
        ("returned a NoneType, expected a function", ("return has_to_stop", "has_to_stop")),
    ],
    "local_indices": [
        ("has 3 samples in epoch 0, expected 4", ("padded[:total]", "order")),
        ("epochs 0 and 1 have the same order", ("seed + epoch", "seed")),
        ("is on no rank", ("seed + epoch", "seed + epoch + 1000 * rank")),
        (
            "the same arguments gave another list the second time",
            ("seed + epoch", "seed + epoch + torch.initial_seed()"),
        ),
        (
            "holds a Tensor, expected int",
            ("padded[:total][rank::world_size]", "list(torch.tensor(padded[:total][rank::world_size]))"),
        ),
        (
            "samples=1, world_size=3: rank 2 has 0 samples",
            ("order * world_size", "order + order[: -samples % world_size]"),
        ),
    ],
    "mean_accuracy": [
        ("divided by the number of ranks, too", (".item()", ".item() / dist.get_world_size()")),
        ("raised ZeroDivisionError", ("[correct, count]", "[correct / count * count, count]")),
        ("returned a Tensor, expected a float", ("(sums[0] / sums[1]).item()", "sums[0] / sums[1]")),
        ("the mean of the ranks' accuracies", ("[correct, count]", "[correct / max(1, count), 1]")),
        ("this rank's own", ("dist.all_reduce(sums)", "sums[1].clamp_(min=1)")),
    ],
    "mean_on_rank_0": [
        ("the sum, not the mean", (" / dist.get_world_size()", "")),
        ("expected None on all ranks but 0", ("if dist.get_rank() == 0:", "if True:")),
        (
            "a hang: rank 0 waits in all_reduce for the other ranks",
            ("dist.all_reduce(total)", "dist.get_rank() or dist.all_reduce(total)"),
        ),
        ("rank 0's own value", ("return total.item() / dist.get_world_size()", "return value")),
        ("returned None, expected a float", ("if dist.get_rank() == 0:", "if False:")),
    ],
    "mean_over_ranks": [
        ("summed, not averaged?", (" / dist.get_world_size()", "")),
        ("returned a Tensor, expected a float", (".item()", "")),
        ("returned a NoneType, expected a float: no return?", ("return total.item() / dist", "total /= dist")),
        ("expected", ("dist.get_world_size()", "2")),
        ("this rank's own value", ("return total.item() / dist.get_world_size()", "return value")),
    ],
    "mended_line": [
        ("SLURM may place 8 tasks on 2 nodes as it likes", ("--ntasks-per-node=4", "--ntasks=8")),
        (
            "srun: error: Unable to create step for job 4711: More processors requested than permitted",
            (
                '"D": (\n            7,\n            "srun torchrun',
                '"D": (\n            7,\n            "srun --ntasks=8 torchrun',
            ),
        ),
        ("rank 1 looks for port 20001, and rank 0 listens on another, 20000", ("SLURM_JOB_ID % 10000", "SLURM_PROCID")),
        ("SLURM signals the tasks, which end at once", ("B:USR1@120", "USR1@300")),
        ("returned a str, expected (number, line)", ("}[script]", "}[script][1]")),
    ],
    "micro_batch_weights": [
        ("all micro-batches count alike", ("count * dist.get_world_size() / total.item()", "1 / len(tokens)")),
        ("others have more or fewer", ("count * dist.get_world_size() / total.item()", "count / sum(tokens)")),
        ("is not taken back", ("count * dist.get_world_size() / total.item()", "count / total.item()")),
        (
            "that is the sum over all tokens, not their mean",
            ("count * dist.get_world_size() / total.item()", "float(count * dist.get_world_size())"),
        ),
        ("returned a NoneType, expected a list of floats", ("return [", "[")),
    ],
    "one_forward_one_backward": [
        ("is no pass of 1 micro-batches", ("min(stages - stage - 1, micro_batches)", "stages - stage - 1")),
        ("keeps 3 activations after ('F', 2), expected 2 at most", ("stages - stage - 1", "stages - stage")),
        ("ticks, expected", ("min(stages - stage - 1, micro_batches)", "0")),
        ("is missing", ("return order", "return order[: len(order) - (stages - stage - 1)]")),
        ("comes before", ('order.append(("B", i))', 'order.insert(0, ("B", i))')),
        (
            "keeps 3 activations after ('F', 2), expected 2 at most",
            ("min(stages - stage - 1, micro_batches)", "micro_batches"),
        ),
    ],
    "outer_step": [
        ("the step goes the other way", ("start - local", "local - start")),
        ("the differences are summed, not averaged", ("gradient /= dist.get_world_size()", "pass")),
        ("that is momentum without Nesterov's look ahead", ("(gradient + momentum * velocity)", "velocity")),
        (
            "that is this rank's own difference, not the average",
            ("dist.all_reduce(gradient)", "pass"),
            ("gradient /= dist.get_world_size()", "pass"),
        ),
        (
            "that is the velocity before the round",
            ("velocity = momentum", "new = momentum"),
            ("momentum * velocity), velocity", "momentum * new), velocity"),
        ),
        (
            "`start` was changed",
            ("start - lr * (gradient + momentum * velocity)", "start.sub_(lr * (gradient + momentum * velocity))"),
        ),
        ("returned a Tensor, expected (weights, velocity)", ("velocity), velocity", "velocity)")),
    ],
    "overlap_averaging": [
        ("all_reduce without async_op=True: backward waits for it", (", async_op=True", ""), ("work.wait()", "pass")),
        ("summed, not averaged?", ("parameter.grad /= dist.get_world_size()", "pass")),
        ("in step 1", ("begun.clear()", "pass")),
        (
            "nothing overlaps",
            ("parameter.register_post_accumulate_grad_hook(begin)", "pass"),
            (
                "for parameter, work in begun:",
                "for parameter in model.parameters():\n            begin(parameter)\n        for parameter, work in begun:",
            ),
        ),
    ],
    "parallel_cross_entropy": [
        ("not a finite number", ("(logits - greatest[:, None]).exp()", "(10 * logits).exp()")),
        ("only the rank that has a target knows its logit", ("dist.all_reduce(picked)", "pass")),
        ("ranks that do not have the target's logit add another one", (" * is_mine", "")),
        (
            "this rank's part of the vocabulary only",
            ("dist.all_reduce(greatest, dist.ReduceOp.MAX)", "pass"),
            ("dist.all_reduce(total)", "pass"),
            ("dist.all_reduce(picked)", "pass"),
        ),
    ],
    "parallel_mlp": [
        (
            "the bias is added once on every rank",
            ("hidden @ second.T", "hidden @ second.T + bias"),
            ("return outputs + bias", "return outputs"),
        ),
        ("the relu is missing", ("torch.relu(inputs @ first.T)", "inputs @ first.T")),
        ("this rank's hidden units only", ("dist.all_reduce(outputs)", "pass")),
        ("averaged, where the contributions add up", ("return outputs", "return outputs / dist.get_world_size()")),
    ],
    "place_in_job": [
        (
            "that is `SLURM_LAUNCH_NODE_IPADDR`, where `srun` runs, and no rank",
            ('first_host(environment["SLURM_STEP_NODELIST"])', 'environment["SLURM_LAUNCH_NODE_IPADDR"]'),
        ),
        (
            "that is `SLURM_NTASKS`, what `srun` would start",
            ('return 0, 0, 1, "localhost"', 'return 0, 0, int(environment.get("SLURM_NTASKS", 1)), "localhost"'),
        ),
        (
            "that is `SLURM_STEP_NODELIST`, all nodes of the step",
            ('first_host(environment["SLURM_STEP_NODELIST"])', 'environment["SLURM_STEP_NODELIST"]'),
        ),
        ("the local rank is 5, expected 1", ("return rank, local_rank", "return rank, rank")),
        (
            "that is `SLURM_LOCALID`, of the task that `srun` has started",
            ('"LOCAL_RANK"', '"SLURM_LOCALID" if "SLURM_LOCALID" in environment else "LOCAL_RANK"'),
        ),
        (
            "that is `SLURM_PROCID`, the number of the task that `srun` has started, which is the launcher's helper",
            ('"RANK" in environment', '"RANK" in environment and "SLURM_PROCID" not in environment'),
        ),
        (
            "the world size is 8, expected 1: that is `SLURM_NTASKS`, what `srun` would start",
            ('"SLURM_STEP_NUM_TASKS" in environment', '"SLURM_PROCID" in environment'),
            ('"SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"', '"SLURM_LOCALID", "SLURM_NTASKS"'),
            (
                'first_host(environment["SLURM_STEP_NODELIST"])',
                'first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))',
            ),
        ),
    ],
    "ring_all_reduce": [
        ("`tensor[0]` is", ("range(2 * (world_size - 1))", "range(world_size - 1)")),
        ("`tensor[", ("if step < world_size - 1:", "if True:")),
        (
            "averaged, where the sum is asked for",
            ("tensor.copy_(flat.view_as(tensor))", "tensor.copy_(flat.view_as(tensor) / world_size)"),
        ),
        (
            "waits in send for rank",
            (
                "for message in dist.batch_isend_irecv([sending, receiving]):",
                "dist.send(pieces[(rank - step) % world_size], right)\n        for message in dist.batch_isend_irecv([receiving]):",
            ),
        ),
        ("shape=(5, 3), contiguous=False: `tensor[", ("tensor.copy_(flat.view_as(tensor))", "pass")),
    ],
    "ring_attention": [
        (
            "every rank's block counts alike",
            ("mean * (total - both).exp() + (scores - both).exp()", "mean + scores.softmax(1)"),
            ("return mean", "return mean / world_size"),
        ),
        (
            "each block was normalised by itself, and then added",
            ("mean * (total - both).exp() + (scores - both).exp()", "mean + scores.softmax(1)"),
        ),
        ("not divided by the root of the width", (" / q.shape[1] ** 0.5", "")),
        ("returned with an isend to rank", ("sending.wait()", "pass")),
        ("this rank's keys and values only", ("range(world_size)", "range(1)")),
    ],
    "sharded_linear": [
        ("summed, not averaged?", (" / world_size", "")),
        (
            "this rank's gradient alone",
            (
                "dist.reduce_scatter_tensor(shard_gradient, gradient.flatten())",
                "shard_gradient = gradient.flatten().chunk(world_size)[dist.get_rank()]",
            ),
            (" / world_size", ""),
        ),
        (
            "calls dist.all_reduce, which this exercise does not allow",
            ("dist.reduce_scatter_tensor(shard_gradient, gradient.flatten())", "dist.all_reduce(gradient)"),
        ),
        (
            "returned a Tensor, expected (outputs, shard_gradient)",
            ("return outputs, shard_gradient / world_size", "return outputs"),
        ),
        ("`outputs` has shape", ("inputs @ weight.T", "inputs @ shard.view(-1, shape[1]).T")),
    ],
    "sharded_units": [
        (
            "forward of unit 1: unit 0's weight still has its storage: free it",
            ("units[i].weight.untyped_storage().resize_(0)", "pass"),
        ),
        ("is not being gathered meanwhile", ("gather(following)", "pass")),
        ("backward of unit 2: unit 1 is not being gathered meanwhile", ("before(i, i - 1)", "before(i, i + 1)")),
        ("all_gather without async_op=True", (", async_op=True", ""), ("gathers[i].wait()", "pass")),
        ("its gather was not waited for", ("gathers[i].wait()", "pass")),
        ("summed, not averaged?", ("shards[i].grad /= dist.get_world_size()", "pass")),
        (
            "this rank's gradient alone",
            (
                "dist.reduce_scatter_tensor(shards[i].grad, units[i].weight.grad.flatten())",
                "shards[i].grad = units[i].weight.grad.flatten().chunk(dist.get_world_size())[dist.get_rank()].clone()",
            ),
            ("shards[i].grad /= dist.get_world_size()", "pass"),
        ),
        ("unit 0's weight still has its whole `grad`", ("units[i].weight.grad = None", "pass")),
        (
            "unit 0's weight still has its storage after backward",
            ("resize_(0)", "resize_(0 if shards[0].grad is None else units[i].weight.nbytes)"),
        ),
        ("forward of unit 0: its weight has no storage", ("enumerate(units)", "[]")),
    ],
    "shares_of_batches": [
        ("batches, expected 7 whole ones", ("range(0, whole, batch_size)", "range(0, samples, batch_size)")),
        ("epochs 0 and 1 have the same order", ("seed + epoch", "seed")),
        ("is there twice", ("seed + epoch", "seed + epoch + 1000 * rank")),
        (
            "the same arguments gave other lists the second time",
            ("seed + epoch", "seed + epoch + torch.initial_seed()"),
        ),
        (
            "has 6 samples over all ranks, expected 7",
            ("batch_size * rank // world_size", "batch_size // world_size * rank"),
            ("batch_size * (rank + 1) // world_size", "begin + batch_size // world_size"),
        ),
    ],
    "step_and_break_even": [
        ("samples are whole, and the largest share decides", ("math.ceil(batch / ranks)", "batch / ranks")),
        ("a ring all-reduce has 2 (n − 1) messages", ("2 * (ranks - 1)", "(ranks - 1)")),
        (
            "nothing hides behind computing, so the two add up",
            ("math.ceil(batch / ranks) * sample_s + ring_s", "max(math.ceil(batch / ranks) * sample_s, ring_s)"),
        ),
        ("that is the batch over all ranks", ("max(1, math.ceil", "ranks * max(1, math.ceil")),
        ("with so few, computing is shorter", ("max(1, math.ceil(ring", "max(1, math.floor(ring")),
    ],
    "stop_together": [
        (
            "a hang: rank 1 waits in all_reduce for the other ranks",
            ("total / dist.get_world_size() < limit", "loss < limit"),
        ),
        (
            "called all_reduce 8 times in 4 steps, expected one a step",
            ("dist.all_reduce(total)", "dist.all_reduce(total.clone()), dist.all_reduce(total)"),
        ),
        ("did 5 steps, expected 4", ("total / dist.get_world_size()", "total")),
        ("did 3 steps, expected 4", ("return steps", "return steps - 1")),
        ("has no len()", ("for loss in losses:", "for loss in losses[: len(losses)]:")),
        (
            "took 5 losses, and so as many training steps, but returned 4",
            ("for loss in losses:", "for loss in list(losses):"),
        ),
    ],
    "sum_in_step": [
        ("a hang: rank 1 waits in all_reduce for the other ranks", ("[: steps.item()]", "")),
        (
            "returned 4 totals, expected 3, the fewest batches of any rank",
            ("return totals", "return totals + [batch.clone() for batch in batches[len(totals) :]]"),
        ),
        ("`batches[0]` was changed", ("batch.clone()", "batch")),
        ("nothing has changed it", ("dist.all_reduce(total)", "pass")),
    ],
    "task_for_ranks": [
        ("that is the sum of all", ("numbers[rank::world_size]", "numbers")),
        ("returned a float, expected a function of the rank", ("return task", "return task(0)")),
    ],
    "through_experts": [
        ("this rank's own expert did it", ("return found", "return work(x)")),
        ("in the order in which they were sent, not in that of the tokens", ("found[order] = back", "found = back")),
        ("sorted twice", ("found[order] = back", "found = back[order]")),
        (
            "failed: RuntimeError",
            ("dist.all_to_all_single(arriving, leaving)", "arriving.fill_(len(x) // len(leaving))"),
        ),
    ],
    "training_state": [
        ("the keys under `model` begin with `module.`", ("model.module.state_dict()", "model.state_dict()")),
        ('the dict has no "optimizer"', ('"optimizer": optimizer.state_dict(),', "")),
        ('the dict has no "rng"', ('"rng": torch.get_rng_state(),', "")),
        ('the dict has no "scheduler"', ('"scheduler": scheduler.state_dict(),', "")),
        ("`epoch` is 0, expected 1: the first that is still to be done", ("epoch + 1", "epoch")),
    ],
    "two_stages": [
        ("`model.0.weight.grad` is None: backward has not come to this stage", ("hidden.backward(gradient)", "pass")),
        ("raised", ("hidden.requires_grad_()", "pass")),
        (
            "`model.0.weight.grad[0, 0]` is",
            ("dist.send(hidden.grad, peer)", "dist.send(torch.ones(hidden_shape), peer)"),
        ),
        ("a hang: rank", ("dist.send(hidden.grad, peer)", "pass")),
        ("returned a Tensor, expected the loss as a float", ("return loss.item()", "return loss")),
        ("5 times what it should be", ("dist.send(hidden.grad, peer)", "dist.send(hidden.grad * len(hidden), peer)")),
    ],
    "waiting_and_transfer": [
        ("nobody has waited here", ("full - came, went - full", "0.0, went - came")),
        ("the other way round", ("full - came, went - full", "went - full, full - came")),
        ("transfer begins when the last rank has come", ("went - full", "went - came")),
        (
            "it is the last rank that waits for nobody, not the first",
            ("full - came, went - full", "came - min(entered), went - came"),
        ),
        ("expected a pair", ("(full - came, went - full)", "full - came")),
        ("returned a NoneType, expected a list of pairs", ("return [", "[")),
    ],
    "who_is_late": [
        ("how late it is to the first of the others", ("max(others)", "min(others)")),
        ("expected a pair: the rank, and seconds", ("late.index(max(late)), max(late)", "late.index(max(late))")),
        (
            "that is the worst step, not the median",
            ("late.append(median(behind))", "late.append(median(behind) > 0 and max(behind))"),
        ),
        ("it is rank 0, expected rank 2", ("late.index(max(late))", "late.index(min(late))")),
    ],
    "zero1_step": [
        ("the gradients are summed, not averaged?", ("mean /= world_size", "pass")),
        (
            "only this rank's share is new",
            ("dist.all_gather_into_tensor(weights, share)", "weights.chunk(world_size)[rank].copy_(share)"),
        ),
        (
            "calls dist.all_reduce, which this exercise does not allow",
            ("dist.reduce_scatter_tensor(mean, gradient)", "dist.all_reduce(gradient)"),
        ),
        ("without momentum", ("momentum.mul_(0.9).add_(mean)", "momentum.copy_(mean)")),
        ("`momentum (step 0)[0]` is 0", ("momentum.mul_(0.9).add_(mean)", "momentum = 0.9 * momentum + mean")),
    ],
    "zero_bubble": [
        (
            "every W follows its I at once",
            ("if i >= stage:", "if True:"),
            ('("W", i - stage)', '("W", i)'),
            ("range(max(0, micro_batches - stage), micro_batches)", "[]"),
        ),
        (
            "micro-batches, expected 2 at most: from F to W",
            ("if i >= stage:", "if False:"),
            ("max(0, micro_batches - stage)", "0"),
        ),
        (
            "('W', 0) is missing",
            ("if i >= stage:", "if False:"),
            ("range(max(0, micro_batches - stage), micro_batches)", "[]"),
        ),
        (
            "comes before ('I', ",
            ('("I", i)', '("W", i)'),
            ('("W", i - stage)', '("I", i - stage)'),
            ('order + [("W", i)', 'order + [("I", i)'),
        ),
    ],
    "zigzag_attention": [
        ("every query sees every key", ("scores.masked_fill(keys > queries[:, None], -torch.inf)", "scores")),
        (
            "masked as if the sequence were cut in order",
            ("pieces[rank], pieces[-1 - rank]", "pieces[2 * rank], pieces[2 * rank + 1]"),
        ),
        (
            "a query does not see its own position",
            ("keys > queries[:, None], -torch.inf", "(keys >= queries[:, None]) & (keys > 0), -1e9"),
        ),
        ("has a query seen nothing yet?", ("keys > queries", "keys >= queries")),
        ("this rank's keys and values only", ("for step in range(world_size):", "for step in range(1):")),
    ],
}
