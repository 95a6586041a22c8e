"""`python -m ascend_vllm_plugin` is `ascend-vllm`."""

from ascend_vllm_plugin.cli import main

raise SystemExit(main())
