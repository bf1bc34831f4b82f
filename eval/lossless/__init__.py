"""Whether speculation changed the output. Enter with `verdict.judge_lossless`, which returns the report's section."""
