"""What a GPU would do and wait for, counted on a CPU. Enter at `record.record_launches`."""
