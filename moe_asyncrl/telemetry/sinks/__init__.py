"""Where a run's figures go besides its own files: TensorBoard, W&B, MLflow. Each follows `metrics.jsonl` on its own."""
