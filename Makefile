# kedge's two commands are `make demo` and `make test`; everything else serves them.
SHELL := /bin/bash
export PATH := $(HOME)/.cargo/bin:$(PATH)
CU13 := $(CURDIR)/.tools/cu13
KEDGE := $(CURDIR)/target/release/kedge

.PHONY: help setup build demo test soak soak-kernels soak-restarts soak-tests soak-power soak-cache soak-fuzz soak-checkpoints soak-interrupts check deny package package-test image docs install uninstall clean

help: ## this text
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-17s %s\n", $$1, $$2}' Makefile

setup: ## install what is missing (Debian packages, nvcc from PyPI into .tools/)
	@scripts/setup

build: ## build kedge, optimised, into target/release
	cargo build --release --workspace --locked

demo: setup ## compile a CUDA program, see it fail without a GPU, run it under kedge
	@$(MAKE) --no-print-directory build
	@scripts/demo

test: ## set up, then run every test (about an hour on 2 cores)
	@scripts/test

soak: build ## the long tests and those under other kernels, each resumable in slices of 10 minutes
	@scripts/soak
	@scripts/soak-tests
	@scripts/soak-cache
	@scripts/soak-fuzz
	@scripts/soak-kernels

soak-kernels: build ## the engine's tests under Linux 5.10 and 6.1 (KERNELS="5.4 6.8") in virtual machines, as root and as a user
	@scripts/soak-kernels --kernels "$(or $(KERNELS),5.10 6.1)"

soak-restarts: build ## every restart of the process engine 20 times (ROUNDS=20), resumable in slices of 10 minutes
	@scripts/soak-restarts --rounds $(or $(ROUNDS),20)

soak-tests: build ## every system test 20 times (ROUNDS=20) beside a load on all cores, resumable in slices of 10 minutes
	@scripts/soak-tests --rounds $(or $(ROUNDS),20)

soak-power: build ## the power of a node with a write-back cache cut 1,000 times for each policy (ROUNDS=1000), resumable in slices of 10 minutes
	@scripts/soak-power --rounds $(or $(ROUNDS),1000)

soak-cache: build ## random calls on a cached folder compared with a plain one, 10,000,000 (TOTAL=10000000), resumable in slices of 10 minutes
	@scripts/soak-cache --total $(or $(TOTAL),10000000)

soak-fuzz: ## every fuzz target for 60 s (TARGETS="image wire" SECONDS=60), resumable in slices of 10 minutes
	@scripts/soak-fuzz --seconds $(or $(SECONDS),60) $(TARGETS)

soak-checkpoints: build ## one GPU job on a software device checkpointed 1,000 times: nothing may grow (about ten minutes)
	KEDGE_CHECKPOINTS=$(or $(ROUNDS),1000) KEDGE_PATIENCE=3000 cargo test --release --locked -p kedge-tests --test gpu incremental::many_checkpoints

soak-interrupts: build ## every CUDA program checkpointed, killed and restarted 10 times (ROUNDS=10), resumable in slices of 10 minutes
	@scripts/soak-interrupts --rounds $(or $(ROUNDS),10)

check: deny ## formatting, lints, layering, generated files, dependencies, the page of GPUs and its plots
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	CUSTOM_LIBFUZZER_PATH=/nowhere/libfuzzer.a cargo check --release --manifest-path fuzz/Cargo.toml --target-dir target --locked
	cargo xtask layering
	cargo xtask features
	cargo xtask columns
	cargo xtask links
	cargo xtask codegen --check
	scripts/gpu-report --check
	scripts/plots --check

deny: ## licences, sources and versions of all dependencies (builds cargo-deny into .tools/ first)
	@[ -x .tools/deny/bin/cargo-deny ] || cargo install --quiet --locked --root .tools/deny cargo-deny@0.18.3
	.tools/deny/bin/cargo-deny check bans licenses sources

install: build ## install into PREFIX (default /usr/local)
	@scripts/install "$(or $(PREFIX),/usr/local)"

uninstall: ## remove what make install put into PREFIX, and nothing else
	@scripts/install --remove "$(or $(PREFIX),/usr/local)"

package: ## a tarball, a .deb, an .rpm and a wheel in target/package (a long build)
	@scripts/setup --packages
	@scripts/package

package-test: ## try the packages in a bare Debian and a virtual environment, without network (as root)
	@scripts/setup --packages
	@scripts/package-test

image: build ## an OCI image of kedge in target/package, for podman load (as root; takes debootstrap)
	@scripts/setup --packages
	@scripts/image

docs: build ## the site in target/docs/site, by mdBook (built into .tools/ first)
	@[ -x .tools/mdbook/bin/mdbook ] || cargo install --quiet --locked --root .tools/mdbook --no-default-features --features search mdbook@0.4.52
	@scripts/docs

clean: ## remove build products, keep .tools/
	cargo clean
