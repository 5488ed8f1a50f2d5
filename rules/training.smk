# Training view: the dataset as trainers of drafters read it. Opt-in by output.training.formats.
# Needs: the merged dataset and, for tokens, the model's tokenizer. Makes: dataset/training/ and dataset/README.md.


if plan.config.output.training.formats:

    rule training_view:
        """Conversations, token ids with loss masks, the report that both must pass, and the dataset card."""
        input:
            dataset=layout.dataset,
            manifest=layout.manifest,
            model=ancient(layout.model_manifest) if "tokens" in plan.config.output.training.formats else [],
        output:
            views=[layout.training(name) for name in plan.config.output.training.formats],
            report=layout.training_report,
            card=layout.card,
        log:
            layout.log("dataset", "training.log"),
        benchmark:
            layout.log("benchmarks", "training_view.tsv")
        retries: 0
        localrule: True
        conda:
            "../envs/pipeline.yaml"
        threads: workflow.resource_settings.cores or 1  # plans and reports name no cores
        params:
            settings=plan.config.output.training.model_dump(),
            short=plan.config.quality.min_supervised_tokens,
        message:
            "Writing the training view"
        script:
            "../scripts/training_view.py"
