"""`python -m gateway.cli` is `tandem`."""

from gateway.cli.main import app

if __name__ == "__main__":
    app(prog_name="tandem")
