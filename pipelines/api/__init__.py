"""What the commands of `baton` do, for programs and notebooks; `import baton` offers it by name."""
