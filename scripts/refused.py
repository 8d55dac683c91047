"""Flags and variables that are not what they seem, each with what to use instead."""

NEAR_MISSES = {
    "PER_DEVICE_BATCH_SIZE": "BATCH_SIZE",
    "GRAD_ACC_STEPS": "GRAD_ACC",
    "LR": "LEARNING_RATE",
}
# Flags of transformers 4 that version 5 removed, with what takes their place
REMOVED_FLAGS = {
    "adafactor": "use --optim adafactor",
    "evaluation_strategy": "use --eval_strategy",
    "fp16_backend": "leave it out, there is one backend",
    "fsdp_min_num_params": 'set "min_num_params" in the --fsdp_config file',
    "fsdp_transformer_layer_cls_to_wrap": 'set "transformer_layer_cls_to_wrap" in the --fsdp_config file',
    "group_by_length": "use --train_sampling_strategy group_by_length",
    "half_precision_backend": "leave it out, there is one backend",
    "include_inputs_for_metrics": "use --include_for_metrics inputs",
    "include_tokens_per_second": "use --include_num_input_tokens_seen",
    "jit_mode_eval": "use --torch_compile",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "no_cuda": "use --use_cpu",
    "overwrite_output_dir": "use a new --output_dir, or --resume_from_checkpoint to go on",
    "per_gpu_eval_batch_size": "use --per_device_eval_batch_size",
    "per_gpu_train_batch_size": "use --per_device_train_batch_size",
    "push_to_hub_model_id": "use --hub_model_id",
    "push_to_hub_token": "use --hub_token",
    "save_safetensors": "leave it out, safetensors is the only format",
    "torchdynamo": "use --torch_compile_backend",
    "use_ipex": "leave it out, PyTorch has these CPU kernels itself",
    "use_mps_device": "leave it out, the device is found by itself",
    "warmup_ratio": "use --warmup_steps with a fraction below 1",
}
# Flags of TrainingArguments that would be accepted here and then have no effect
UNUSED_FLAGS = {
    "do_eval": "use --eval_strategy",
    "do_predict": "use scripts/evaluate.py",
    "do_train": "leave it out, training is what train.py does",
    "hub_model_id": "upload the saved folder afterwards",
    "push_to_hub": "upload the saved folder afterwards",
}
