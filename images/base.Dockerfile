# For Dependabot, which reads no ARG: the default of PYTHON_IMAGE in Dockerfile.
FROM python:3.11-slim-bookworm@sha256:528257d48c1da0dcecc2e725d1ae34498d60c965f1241e39cd6a85a8859bdf84
