"""A push to the Hugging Face Hub, or whatever speaks its protocol at `HF_ENDPOINT`."""

from __future__ import annotations

import os

from baton.components.shared.core.errors import BatonError, UserError
from baton.components.shared.recipe.export import Hub
from baton.components.shared.runs.documents.outcome import Pushed
from baton.components.shared.runs.run import Run
from baton.components.shared.store.bundles import Manifest


def push(run: Run, spec: Hub, manifest: Manifest, folder: str) -> Pushed:
    """Pushes the files of an export, once.

    Args:
        run: The run, which remembers what was pushed.
        spec: Where to.
        manifest: Of the export.
        folder: Its files.

    Raises:
        UserError: there is no token, or the Hub refuses.
        BatonError: the Hub cannot be reached.
    """
    done = run.read(Pushed)
    if done and (done.repo, done.revision, done.export) == (spec.repo, spec.revision, manifest.folder):
        return done
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise UserError(
            f"export.hub.repo: nothing can be pushed to {spec.repo} without HF_TOKEN in the environment.",
            remedy="Set it to a token that may write there; in a cluster by resources.secret_env.",
        )
    commit = _push(spec, folder, token, run.name)
    pushed = Pushed(repo=spec.repo, revision=spec.revision, export=manifest.folder, commit=commit)
    run.write(pushed)
    return pushed


def _push(spec: Hub, folder: str, token: str, name: str) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # of its own client

    api = HfApi(token=token)
    try:
        api.create_repo(spec.repo, private=spec.private, exist_ok=True)
        if spec.revision != "main":
            api.create_branch(spec.repo, branch=spec.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=spec.repo, folder_path=folder, revision=spec.revision, commit_message=f"Baton run {name}"
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = " ".join(str(error.server_message or error).split())[:200].replace(token, "…")
        if status in (401, 403, 404):
            raise UserError(
                f"export.hub.repo: the Hub refuses a push to {spec.repo} ({status}): {reason}",
                remedy="Check the name of the repository and that HF_TOKEN may write to it.",
            ) from None
        raise BatonError(f"the push to {spec.repo} failed ({status}): {reason}", remedy="Run again.") from None
    except ValueError as error:
        raise UserError(
            f"export.hub.repo: a push to {spec.repo} is refused: {' '.join(str(error).split())[:300]}",
            remedy="If it is for the licence: the Hub knows licences by names such as apache-2.0 (export.licence).",
        ) from None
    except (HTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:200].replace(token, "…")
        raise BatonError(
            f"the Hub cannot be reached for a push to {spec.repo}: {type(error).__name__}: {reason}",
            remedy="The export itself is committed; run again.",
        ) from None
    return str(commit.oid)
