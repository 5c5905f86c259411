"""New weights: from the Megatron ranks to every server, checked by checksum (law 6)."""

import shutil

from megatron_dapo.coordinator.parts import Parts


async def publish_weights(parts: Parts, version: int) -> None:
    """Returns when every server holds the trainer's weights as `version`, proven tensor by tensor."""
    deadline = parts.config.run.step_deadline_s
    folder = parts.run_dir.path / "weights" / f"v{version}"
    parts.run_dir.check_there()
    await parts.services.trainer.export_hf(folder)
    await parts.services.waits.wait_for(
        f"weight version {version}", "rollout servers", deadline, parts.services.fleet.publish(folder, version)
    )
    # A restarted server reads the newest version again, so only the older ones may go.
    for older in folder.parent.glob("v*"):
        if older != folder:
            shutil.rmtree(older)
