"""`baton generate`: a trained model, tried out."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from baton.cli.options import Output, OutputOption, print_json, reported
from baton.errors import UserError
from baton.terminal import Terminal, visible

ModelUris = Annotated[list[str], typer.Argument(metavar="MODEL_URI…", help="Exported models, checkpoints or hub ids.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run Python code that comes with the model.")]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Use the chat template, without a prompt for a conversation; or continue the prompt as it is. Else the "
        "prompt is written as in training, where that is known.",
        show_default=False,
    ),
]


def generate(
    model_uris: ModelUris,
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    file: Annotated[
        str | None,
        typer.Option(
            help="Prompts: a line of text each, or JSON lines with `prompt` or `messages`; - is standard input."
        ),
    ] = None,
    chat: Chat = None,
    system: Annotated[str | None, typer.Option(help="What a chat begins with, instead of data.system.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token each time.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Share of the probability to sample from.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Decides what is sampled.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 8,
    trust: Trust = False,
    output: OutputOption = Output.text,
) -> None:
    """Writes text with a model, or with several side by side: for one prompt, a file of them, or in a chat.

    With a file, `--json` prints a JSON line for each prompt.
    """
    with reported(output):
        from baton import events
        from baton.cli import chat as using

        _require_one(prompt, file, chat=bool(chat), in_json=output is Output.json)
        events.setup_logging()
        out = Terminal(highlight=False)
        settings = using.Settings(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, chat=chat, system=system
        )
        if prompt is None and file is None:
            using.converse(out, [using.load(uri, trust=trust) for uri in model_uris], settings)
            return
        prompts = using.prompts_of(file) if file is not None else [using.Prompt(prompt or "")]
        texts_by_model = {
            uri: using.write(using.load(uri, trust=trust), prompts, settings, batch_size) for uri in model_uris
        }
        for number, item in enumerate(prompts):
            answers = {uri: texts[number] for uri, texts in texts_by_model.items()}
            if output is Output.json:
                print_json({"prompt": item.shown(), "answers": answers})
            elif len(prompts) == 1 and len(answers) == 1:
                typer.echo(visible(answers[model_uris[0]]) if sys.stdout.isatty() else answers[model_uris[0]])
            else:
                using.show(out, item.shown(), answers)


def _require_one(prompt: str | None, file: str | None, *, chat: bool, in_json: bool) -> None:
    """Makes sure that there is one thing to continue.

    Raises:
        UserError: there is none, or there are two.
    """
    if prompt is not None and file is not None:
        raise UserError("--prompt and --file are given both.", remedy="Give one of them.")
    if prompt is None and file is None and chat and in_json:
        raise UserError("a chat at the terminal is no JSON.", remedy="Give --prompt or --file.")
    if prompt is None and file is None and not chat:
        raise UserError("there is nothing to continue.", remedy="Give --prompt, --file or --chat.")
