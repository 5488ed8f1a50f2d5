# Report: the run in one page. Needs: a proven dataset; for an unfinished run, `python scripts/report.py` needs nothing.
# Makes: report.html.


rule report:
    """Throughput, lengths, verdicts, alarms, cost and provenance of the run, in one page."""
    input:
        manifest=layout.manifest,
    output:
        report=report(
            layout.report,
            caption="captions/report.rst",
            category="Run",
        ),
    log:
        layout.log("report.log"),
    benchmark:
        layout.log("benchmarks", "report.tsv")
    retries: 0
    localrule: True
    conda:
        "../envs/pipeline.yaml"
    message:
        "Making the report"
    script:
        "../scripts/report.py"
