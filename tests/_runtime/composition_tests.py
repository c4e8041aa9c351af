"""The tests of each cell of the composition table, as ``folder::test`` or ``::test``; docs/composition.md has them."""

from gradweave._runtime.claims import Technique

FUSE, COMPILE, REORDER = Technique.FUSE, Technique.COMPILE, Technique.REORDER
DASO, DATA_PARALLEL, PIPELINE, EVA = Technique.DASO, Technique.DATA_PARALLEL, Technique.PIPELINE, Technique.EVA

NO_MODEL = "parallel/pipeline::test_a_pipeline_is_no_model_for_others"
NO_REPLICAS = "parallel/pipeline::test_layers_of_a_pipeline_are_no_replicas"
AVERAGED = "parallel/pipeline::test_a_model_whose_replicas_are_averaged"
EVA_IN_PARTS = "parallel/pipeline::test_weights_are_those_of_the_whole_model_bit_for_bit"
EVA_BEFORE = "parallel/pipeline::test_an_optimizer_that_was_made_for_the_whole_model_is_refused"
EVA_NODE = "parallel/daso::test_ranks_of_a_node_stay_alike_with_an_optimizer_that_has_statistics_of_its_own"
EVA_OTHER_GROUP = "parallel/daso::test_another_group_of_the_optimizers_own_is_refused"
EVA_FUSED = ("optim::test_it_trains_as_in_stock_order", "optim::test_fusion_in_backward_is_refused")
EVA_REFUSED = ("optim::test_data_parallel_is_refused",)

OWN = {
    (FUSE, FUSE): (
        "fusion::test_two_optimizers_on_two_parts_of_a_model",
        "fusion::test_gan_style_turns",
        "fusion::test_attaching_twice_is_refused_until_detached",
    ),
    (FUSE, COMPILE): ("compiler::test_fuse_and_compile_refuse_each_other",),
    (FUSE, REORDER): (
        "reordering::test_fuse",
        "reordering::test_with_fuse",
        "reordering::test_it_needs_forward_fusion",
    ),
    (FUSE, DASO): ("parallel/daso::test_fusion_and_daso_refuse_each_other",),
    (FUSE, DATA_PARALLEL): ("parallel/data_parallel::test_fusion_and_data_parallel_refuse_each_other",),
    (FUSE, PIPELINE): (
        "parallel/pipeline::test_updates_fused_into_the_next_forward",
        "parallel/pipeline::test_updates_fused_into_backward_are_refused",
    ),
    (FUSE, EVA): EVA_FUSED,
    (COMPILE, FUSE): ("compiler::test_fuse_and_compile_refuse_each_other",),
    (COMPILE, COMPILE): ("compiler::test_two_steps_take_turns",),
    (COMPILE, REORDER): ("reordering::test_a_compiled_step_has_its_own_order",),
    (COMPILE, DASO): ("parallel/daso::test_a_compiled_step_and_daso_refuse_each_other",),
    (COMPILE, DATA_PARALLEL): ("parallel/data_parallel::test_a_compiled_step_and_data_parallel_refuse_each_other",),
    (COMPILE, PIPELINE): (NO_MODEL,),
    (COMPILE, EVA): ("optim::test_replayed_steps_are_the_eager_ones_bit_for_bit",),
    (REORDER, FUSE): ("reordering::test_fuse", "reordering::test_with_fuse"),
    (REORDER, COMPILE): ("reordering::test_a_compiled_step_refuses_a_reordered_model",),
    (REORDER, REORDER): ("reordering::test_a_second_one_is_refused_on_a_part_and_on_the_whole",),
    (REORDER, DASO): ("parallel/daso::test_a_reordered_model",),
    (REORDER, DATA_PARALLEL): ("parallel/data_parallel::test_reorder_and_data_parallel_refuse_each_other",),
    (REORDER, PIPELINE): ("parallel/pipeline::test_reordered_layers",),
    (REORDER, EVA): ("optim::test_reorder",),
    (DASO, FUSE): ("parallel/daso::test_fusion_and_daso_refuse_each_other",),
    (DASO, COMPILE): ("parallel/daso::test_a_compiled_step_and_daso_refuse_each_other",),
    (DASO, REORDER): ("parallel/daso::test_a_reordered_model",),
    (DASO, DASO): ("parallel/daso::test_what_is_refused_names_argument_and_remedy",),
    (DASO, DATA_PARALLEL): (
        "parallel/data_parallel::test_daso_and_data_parallel_refuse_each_other",
        "parallel/daso::test_a_model_in_data_parallel_whatever_its_optimizer",
    ),
    (DASO, PIPELINE): (AVERAGED,),
    (DASO, EVA): (EVA_NODE, EVA_OTHER_GROUP),
    (DATA_PARALLEL, FUSE): ("parallel/data_parallel::test_fusion_and_data_parallel_refuse_each_other",),
    (DATA_PARALLEL, COMPILE): ("parallel/data_parallel::test_a_compiled_step_and_data_parallel_refuse_each_other",),
    (DATA_PARALLEL, REORDER): ("parallel/data_parallel::test_reorder_and_data_parallel_refuse_each_other",),
    (DATA_PARALLEL, DASO): (
        "parallel/data_parallel::test_daso_and_data_parallel_refuse_each_other",
        "parallel/daso::test_a_model_in_data_parallel_whatever_its_optimizer",
    ),
    (DATA_PARALLEL, DATA_PARALLEL): (
        "parallel/data_parallel::test_a_second_one_is_refused_until_the_first_is_detached",
    ),
    (DATA_PARALLEL, PIPELINE): (AVERAGED,),
    (DATA_PARALLEL, EVA): EVA_REFUSED,
    (PIPELINE, FUSE): (
        "parallel/pipeline::test_updates_fused_into_the_next_forward",
        "parallel/pipeline::test_updates_fused_into_backward_are_refused",
    ),
    (PIPELINE, COMPILE): (NO_MODEL,),
    (PIPELINE, REORDER): (NO_MODEL,),
    (PIPELINE, DASO): (NO_REPLICAS,),
    (PIPELINE, DATA_PARALLEL): (NO_REPLICAS,),
    (PIPELINE, PIPELINE): ("parallel/pipeline::test_two_pipelines_on_the_same_layers_add_up_their_gradients",),
    (PIPELINE, EVA): (EVA_IN_PARTS,),
    (EVA, FUSE): EVA_FUSED,
    (EVA, COMPILE): ("optim::test_replayed_steps_are_the_eager_ones_bit_for_bit",),
    (EVA, REORDER): ("optim::test_reorder",),
    (EVA, DASO): (EVA_NODE, EVA_OTHER_GROUP),
    (EVA, DATA_PARALLEL): EVA_REFUSED,
    (EVA, PIPELINE): ("optim::test_a_pipeline_of_one_rank", EVA_BEFORE),
    (EVA, EVA): ("optim::test_two_on_two_parts_of_a_model",),
}

_DASO_COMPANY = "parallel/daso::test_what_else_averages_is_found_before_it_has"
_ORDERS = "parallel/data_parallel::test_in_every_order"
_LAYERS = "parallel/pipeline::test_compiled_wrapped_and_sharded_layers"
_WRAPPED = "fusion::test_an_optimizer_that_a_framework_has_wrapped"
WITH_TORCH = {
    "DistributedDataParallel": {
        "fuse forward": ("fusion::test_two_ranks_train_as_under_plain_ddp",),
        "fuse backward": ("fusion::test_backward_is_refused_under_ddp",),
        "compile": ("compiler::test_what_is_refused_at_once",),
        "reorder": ("reordering::test_crossing_a_step_border_under_ddp_is_refused",),
        "DASO": ("parallel/daso::test_with_data_parallel_inside_the_node", _DASO_COMPANY),
        "DataParallel": (_ORDERS,),
        "Pipeline": (_LAYERS,),
        "Eva": ("optim::test_two_ranks_train_as_one_on_the_whole_batch", "optim::test_two_ranks"),
    },
    "FSDP2": {
        "fuse forward": ("fusion::test_fsdp_is_refused",),
        "fuse backward": ("fusion::test_fsdp_is_refused",),
        "compile": ("compiler::test_sharded_parameters_are_refused",),
        "reorder": ("reordering::test_fsdp_is_refused",),
        "DASO": ("parallel/daso::test_sharded_parameters_are_refused", _DASO_COMPANY),
        "DataParallel": (_ORDERS,),
        "Pipeline": (_LAYERS,),
        "Eva": ("optim::test_sharded_models_are_refused",),
    },
    "a model under `torch.compile`": {
        "fuse forward": (
            "fusion::test_compiled_models",
            "::test_a_model_that_is_compiled_after_fuse",
            "::test_a_part_that_is_compiled_in_mid_training_finds_nothing_pending",
        ),
        "fuse backward": ("fusion::test_compiled_models", "::test_a_step_that_is_compiled"),
        "compile": ("compiler::test_a_model_that_is_compiled_already",),
        "reorder": (
            "reordering::test_what_cannot_be_reordered_is_refused",
            "reordering::test_a_model_that_is_compiled_after_it_runs_in_stock_order",
            "reordering::test_what_is_compiled_behind_it_gives_the_same_bits",
        ),
        "DASO": ("parallel/daso::test_a_compiled_model",),
        "DataParallel": ("parallel/data_parallel::test_models_and_optimizers_that_are_refused", _ORDERS),
        "Pipeline": (_LAYERS,),
        "Eva": ("optim::test_whole_graphs",),
    },
    "activation checkpointing": {
        "fuse forward": ("fusion::test_activation_checkpointing",),
        "fuse backward": ("fusion::test_activation_checkpointing",),
        "compile": ("compiler::test_replay_is_the_eager_step_bit_for_bit",),
        "reorder": ("reordering::test_activation_checkpointing",),
        "DASO": ("parallel/daso::test_reentrant_checkpointing",),
        "DataParallel": (
            "parallel/data_parallel::test_activation_checkpointing",
            "parallel/data_parallel::test_checkpoints_inside_of_a_backward",
        ),
        "Pipeline": ("parallel/pipeline::test_norms_frozen_layers_convolutions_tuples_and_recomputed_activations",),
        "Eva": ("optim::test_activation_checkpointing_counts_once",),
    },
    "GradScaler": {
        "fuse forward": ("fusion::test_gradient_scaling_with_and_without_infinities",),
        "fuse backward": ("fusion::test_a_loop_that_reads_gradients_is_refused_in_the_first_step",),
        "compile": ("compiler::test_loss_scaling_leaves_out_updates_that_are_not_finite",),
        "reorder": ("reordering::test_gradient_scaling",),
        "DASO": ("parallel/daso::test_steps_left_out_by_gradient_scaling_keep_everybody_in_step",),
        "DataParallel": ("parallel/data_parallel::test_loops_of_all_kinds_give_what_ddp_gives",),
        "Pipeline": (),
        "Eva": ("optim::test_gradient_scaling",),
    },
    "clipping": {
        "fuse forward": (
            "fusion::test_clipping_by_norm_is_exact_under_forward",
            "fusion::test_clipping_by_value_is_exact_under_forward",
        ),
        "fuse backward": ("fusion::test_a_loop_that_reads_gradients_is_refused_in_the_first_step",),
        "compile": ("compiler::test_the_true_norm_is_available", "compiler::test_clipping_by_value"),
        "reorder": ("reordering::test_clipping",),
        "DASO": ("parallel/daso::test_accumulation_counts_steps_declared_or_not",),
        "DataParallel": ("parallel/data_parallel::test_clipping_accumulation_and_schedules",),
        "Pipeline": ("parallel/pipeline::test_weights_after_training_with_clipping",),
        "Eva": ("optim::test_micro_batches_scaling_and_clipping_in_a_compiled_step",),
    },
    "Accelerate": {
        "fuse forward": (_WRAPPED,),
        "fuse backward": (_WRAPPED,),
        "compile": ("compiler::test_wrapped_optimizers_of_accelerate",),
        "reorder": (),
        "DASO": (_DASO_COMPANY,),
        "DataParallel": (_ORDERS,),
        "Pipeline": (),
        "Eva": ("optim::test_two_ranks",),
    },
    "Lightning": {
        "fuse forward": (_WRAPPED,),
        "fuse backward": (_WRAPPED,),
        "compile": ("compiler::test_wrapped_optimizers_of_lightning",),
        "reorder": (),
        "DASO": ("parallel/daso::test_a_trainer_of_one_device_gives_what_a_loop_gives",),
        "DataParallel": (_ORDERS,),
        "Pipeline": (),
        "Eva": ("optim::test_two_ranks_have_the_same_weights",),
    },
}
