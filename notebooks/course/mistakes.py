"""The 83 mistakes of the five texts that this course grew from: what is wrong with each, and where the course shows it.

The numbers are text and mistake. A place is an exhibit of `course.pitfalls`, or a lesson and a cell, "06#overlap-text".
"""

from __future__ import annotations

from typing import NamedTuple

TEXTS = {
    0: "DataParallel and “DDP” on MNIST",
    1: "ResNet-50 on CIFAR-10 under SLURM",
    2: "distributed training in six steps",
    3: "an adaptation of PyTorch's “Writing Distributed Applications”",
    4: "torch.multiprocessing",
}


class Mistake(NamedTuple):
    """What a text does or says, and what is true."""

    says: str
    place: str


MISTAKES = {
    "0.1": Mistake("An image of 1 × 28 × 28 goes into Linear(784, 10): flatten it first.", "images_into_linear"),
    "0.2": Mistake("The “DDP” example wraps nn.DataParallel: ranks exchange nothing.", "ddp_example"),
    "0.3": Mistake("DataParallel over all GPUs inside each rank: an error from rank 1 on.", "data_parallel_in_ranks"),
    "0.4": Mistake("Nobody says where the ranks meet: an error names MASTER_ADDR.", "no_address"),
    "0.5": Mistake("Ranks begin with different weights; DDP sends rank 0's to all.", "12#0b50f406"),
    "0.6": Mistake("Four ranks with a GPU each, however many there are.", "gpu_for_every_rank"),
    "0.7": Mistake("NCCL without a GPU.", "nccl_without_gpu"),
    "0.8": Mistake("No torch.cuda.set_device(local_rank): every rank may open a context on GPU 0.", "16#on-gpus"),
    "0.9": Mistake("Every rank downloads: late ones may read half of a file.", "everybody_downloads"),
    "0.10": Mistake("The last batch's loss is printed as the epoch's.", "loss_after_the_loop"),
    "0.11": Mistake("Each rank prints its own loss, none the global loss.", "my_loss"),
    "0.12": Mistake("64 is the whole batch in one example and the batch per rank in the other.", "per_rank_or_in_all"),
    "0.13": Mistake("The group is not destroyed in a `finally`: after an error it is still there.", "cell_run_again"),
    "0.14": Mistake(
        "“DDP extends DataParallel”: one is a process with threads, one a process per replica.", "16#claims"
    ),
    "1.1": Mistake("“DDP partitions the parameters”: every rank has them all.", "part_of_the_model"),
    "1.2": Mistake("“Parameters are synchronised”: gradients are averaged, during backward.", "06#overlap-text"),
    "1.3": Mistake("Model parallelism is promised, and only data parallelism shown; lesson 07 has it.", "16#claims"),
    "1.4": Mistake(
        "The host of srun as address: right in a batch script, by luck; not from a login node.", "address_of_srun"
    ),
    "1.5": Mistake("Port 29500 for everybody: a second job on the machine finds it taken.", "port_taken"),
    "1.6": Mistake(
        "Only SLURM's variables: a KeyError outside SLURM; under srun torchrun, silently the wrong rank.",
        "only_slurms_variables",
    ),
    "1.7": Mistake("nvidia-smi is called where there may be none.", "nvidia_smi_everywhere"),
    "1.8": Mistake("A thousand outputs for ten classes: the first loss is ln 1000.", "thousand_classes"),
    "1.9": Mistake("ImageNet's first layers shrink an image of 32 × 32 to 1 × 1.", "imagenet_stem"),
    "1.10": Mistake("pretrained=False is deprecated; weights=None is meant.", "pretrained_false"),
    "1.11": Mistake("A rate of 0.0001 without momentum, two epochs: next to nothing is learnt.", "steps_of_sgd"),
    "1.12": Mistake("128 // n images per rank: batches of 126 on 3 and 6 ranks, in more steps.", "batch_of_128"),
    "1.13": Mistake(
        "BatchNorm over the 16 images of a rank: another gradient than the batch's.", "batch_norm_in_parts"
    ),
    "1.14": Mistake("set_epoch is not called: one order for all epochs.", "three_epochs"),
    "1.15": Mistake("The clock does not wait for the GPU.", "clock_around_a_product"),
    "1.16": Mistake("Rank 0's loss is printed as the loss.", "my_loss"),
    "1.17": Mistake("num_workers=0: loading and training take turns.", "num_workers_0"),
    "1.18": Mistake("DDP's own state_dict is saved: `module.` in every key.", "state_of_ddp"),
    "1.19": Mistake("Neither epoch nor optimizer is saved: training resumes at epoch 0.", "four_epochs_in_two_runs"),
    "1.20": Mistake("The folder for checkpoints is never made.", "saved_to_checkpoint"),
    "1.21": Mistake("download=False, and nobody has downloaded.", "no_download"),
    "1.22": Mistake("The group is never destroyed.", "cell_run_again"),
    "1.23": Mistake("Only the training loss is looked at: it falls with shuffled labels, too.", "shuffled_labels"),
    "1.24": Mistake("One run per point, no efficiency, 16 images per GPU: not a scaling test.", "11#5a137672"),
    "1.25": Mistake("(.2023, .1994, .2010) are means of the images' own deviations.", "standard_deviation"),
    "1.26": Mistake("50,000 images on 3 or 6 ranks: 1 or 4 are drawn twice.", "equal_parts"),
    "2.1": Mistake("init_process_group without a launcher: an error names RANK.", "no_address"),
    "2.2": Mistake("“num_workers gives each process its data”: the sampler does.", "num_workers_2"),
    "2.3": Mistake("No set_epoch: one order for all epochs.", "three_epochs"),
    "2.4": Mistake("A class has lost its indentation.", "three_mistakes"),
    "2.5": Mistake("Two Linear layers with nothing between them are one.", "two_linear_layers"),
    "2.6": Mistake("Every rank uses cuda:0 and cuda:1: two GPUs for all.", "16#on-gpus"),
    "2.7": Mistake("`.to` moves a network that was cut.", "moving_a_cut_network"),
    "2.8": Mistake("Targets on another device than the output.", "output_and_targets"),
    "2.9": Mistake("The optimizer is never made.", "three_mistakes"),
    "2.10": Mistake("param_group['weight'] does not exist.", "weights_in_groups"),
    "2.11": Mistake("Weights are averaged that are equal already.", "averaged_weights"),
    "2.12": Mistake("A leaf that requires a gradient is divided in place.", "dividing_in_place"),
    "2.13": Mistake("world_size is never set.", "three_mistakes"),
    "2.14": Mistake("“Aggregated at the end of each step”: bucket by bucket, inside backward.", "06#overlap-text"),
    "2.15": Mistake(
        "“all_reduce may make gradients explode”: a sum that nobody divides is n times too large.", "summed_gradients"
    ),
    "2.16": Mistake("“Split evenly”, with no word on how: a sampler repeats images.", "equal_parts"),
    "3.1": Mistake("group=0 is no group.", "group_0"),
    "3.2": Mistake("dist.reduce_op is deprecated; ReduceOp is meant.", "reduce_op"),
    "3.3": Mistake(
        "Process forks (Linux, up to Python 3.13): stuck once the parent has computed with threads.",
        "fork_after_computing",
    ),
    "3.4": Mistake("join, without checking the exit code.", "join_at_the_end"),
    "3.5": Mistake("gloo with CUDA tensors: each goes through the host's memory.", "16#on-gpus"),
    "3.6": Mistake("Port 29500 for everybody.", "port_taken"),
    "3.7": Mistake("The group is never destroyed.", "cell_run_again"),
    "3.8": Mistake("One seed for all ranks: equal weights, and equal dropout masks.", "one_seed_for_all"),
    "3.9": Mistake("int(fraction × length) drops up to n − 1 images, for some n.", "int_of_a_fraction"),
    "3.10": Mistake("Data are dealt out once, for good.", "partitioned_once"),
    "3.11": Mistake(
        "int(128 / n): batches of 126 on 3 and 6 ranks; none of the part's images is lost by it.", "batch_of_128"
    ),
    "3.12": Mistake("One all-reduce per parameter, after backward.", "one_call_per_tensor"),
    "3.13": Mistake("An unused parameter has no gradient to average.", "spare_layer"),
    "3.14": Mistake("The epoch's loss is a mean of batch means; the last batch is shorter.", "loss_of_an_epoch"),
    "3.15": Mistake("Every rank downloads.", "everybody_downloads"),
    "3.16": Mistake(".cuda(rank), whether there is such a GPU or not.", "gpu_for_every_rank"),
    "3.17": Mistake(
        "Only int(), which rounds all parts down, gives all ranks as many steps; a rank with one more fails, or waits.",
        "one_step_more",
    ),
    "4.1": Mistake("“Training” without a loss, a backward pass or a step.", "called_training"),
    "4.2": Mistake("Processes that exchange nothing do not train together.", "ddp_example"),
    "4.3": Mistake("A CPU model passed to processes is shared; `.cuda()` in each makes copies.", "model_passed_on"),
    "4.4": Mistake("set_start_method in a cell: an error the second time.", "start_method_twice"),
    "4.5": Mistake("A function of the notebook is pickled by name.", "function_of_the_notebook"),
    "4.6": Mistake("range(device_count()): without a GPU no process, and no error.", "one_process_per_gpu"),
    "4.7": Mistake("join, without checking the exit code.", "join_at_the_end"),
    "4.8": Mistake("Random inputs without a seed: no run can be repeated.", "random_inputs"),
    "4.9": Mistake("Tensors through a Queue, and no word that the sender must live.", "tensor_in_a_queue"),
    "4.10": Mistake(
        "“Distributed training improves generalisation”: equal batches give equal steps; larger ones do worse.",
        "12#larger-batch",
    ),
}
