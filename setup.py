"""Lists the packages of a wheel, beside pyproject.toml: configs/ becomes the folder that zerojax.configs reads when it is installed."""

import setuptools

CONFIGS = "zerojax.configs.configs"

setuptools.setup(
    packages=[*setuptools.find_packages(include=["zerojax*", "pallas_kernels*"]), CONFIGS],
    package_dir={CONFIGS: "configs"},
    package_data={
        "zerojax": [
            "py.typed",
            "commands/completion.sh",
            "plan/target_configs/*.txtpb",
            "clock/tables/*.json",
            "trainer/card/pasts/*.json",
        ],
        "pallas_kernels": ["py.typed"],
        CONFIGS: ["*.json", "*.jsonl", "*/*.json"],
    },
)
