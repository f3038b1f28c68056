"""`python -m tests.real_models`: fetch every model that `make test-real-models` wants."""

from tests.real_models.weights import MODELS, fetched

if __name__ == "__main__":
    for name in MODELS:
        print(f"{name}: {fetched(name)}", flush=True)
