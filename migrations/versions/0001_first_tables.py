"""The first tables: those of section 8 of the design.

Revision ID: 0001
Revises: none
"""

from alembic import op
import sqlalchemy as sa

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "acceptance_window",
        sa.Column("drafter", sa.String(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("bucket", sa.DateTime(timezone=True), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("proposed", sa.Integer(), nullable=False),
        sa.Column("accepted", sa.Integer(), nullable=False),
        sa.Column("histogram", sa.JSON(), nullable=False),
        sa.Column("draft_ms", sa.Double(), nullable=False),
        sa.Column("verify_ms", sa.Double(), nullable=False),
        sa.Column("total_ms", sa.Double(), nullable=False),
        sa.Column("output_tokens", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint(
            "drafter", "version", "workload", "policy", "k", "bucket", name=op.f("pk_acceptance_window")
        ),
    )
    op.create_table(
        "api_key",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
        sa.UniqueConstraint("sha256", name=op.f("uq_api_key_sha256")),
    )
    op.create_table(
        "audit_log",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("before", sa.JSON(), nullable=False),
        sa.Column("after", sa.JSON(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("previous_hash", sa.String(), nullable=False),
        sa.Column("hash", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_log")),
        sa.UniqueConstraint("previous_hash", name=op.f("uq_audit_log_previous_hash")),
    )
    op.create_table(
        "drafter",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("target_fingerprint", sa.String(), nullable=False),
        sa.Column("tokenizer_fingerprint", sa.String(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("retired_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_drafter")),
        sa.UniqueConstraint("name", name=op.f("uq_drafter_name")),
    )
    op.create_table(
        "folded_record",
        sa.Column("record_id", sa.String(), nullable=False),
        sa.Column("folded_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("record_id", name=op.f("pk_folded_record")),
    )
    op.create_index(op.f("ix_folded_record_folded_at"), "folded_record", ["folded_at"], unique=False)
    op.create_table(
        "job",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("drafter", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("holder", sa.String(), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("touched_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("state IN ('queued', 'running', 'done', 'failed')", name=op.f("ck_job_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
    )
    op.create_index(
        "uq_job_open",
        "job",
        ["kind", "drafter"],
        unique=True,
        sqlite_where=sa.text("state IN ('queued', 'running')"),
        postgresql_where=sa.text("state IN ('queued', 'running')"),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("topic", sa.String(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.create_index(op.f("ix_outbox_sent_at"), "outbox", ["sent_at"], unique=False)
    op.create_table(
        "server",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("host_kind", sa.String(), nullable=False),
        sa.Column("drafter", sa.String(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("error", sa.String(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_server")),
    )
    op.create_index(op.f("ix_server_drafter"), "server", ["drafter"], unique=False)
    op.create_table(
        "feedback_window",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("training", sa.Integer(), nullable=False),
        sa.Column("holdout", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("state IN ('open', 'closed')", name=op.f("ck_feedback_window_state")),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_feedback_window_drafter_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_feedback_window")),
    )
    op.create_index(
        "uq_feedback_window_open",
        "feedback_window",
        ["drafter_id"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_table(
        "drafter_version",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.Integer(), nullable=True),
        sa.Column("window_id", sa.Integer(), nullable=True),
        sa.Column("weights_sha256", sa.String(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_drafter_version_drafter_id")),
        sa.ForeignKeyConstraint(
            ["parent_id"], ["drafter_version.id"], name=op.f("fk_drafter_version_parent_id")
        ),
        sa.ForeignKeyConstraint(
            ["window_id"], ["feedback_window.id"], name=op.f("fk_drafter_version_window_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_drafter_version")),
        sa.UniqueConstraint("drafter_id", "id", name=op.f("uq_drafter_version_drafter_id_id")),
        sa.UniqueConstraint("drafter_id", "number", name=op.f("uq_drafter_version_drafter_id_number")),
        sa.UniqueConstraint("parent_id", "window_id", name=op.f("uq_drafter_version_parent_id_window_id")),
    )
    op.create_table(
        "window_record",
        sa.Column("record_id", sa.String(), nullable=False),
        sa.Column("window_id", sa.Integer(), nullable=False),
        sa.Column("part", sa.String(), nullable=False),
        sa.Column("tenant", sa.String(), nullable=False),
        sa.Column("workload", sa.String(), nullable=False),
        sa.CheckConstraint("part IN ('training', 'holdout')", name=op.f("ck_window_record_part")),
        sa.ForeignKeyConstraint(
            ["window_id"], ["feedback_window.id"], name=op.f("fk_window_record_window_id")
        ),
        sa.PrimaryKeyConstraint("record_id", name=op.f("pk_window_record")),
    )
    op.create_index(op.f("ix_window_record_tenant"), "window_record", ["tenant"], unique=False)
    op.create_index(op.f("ix_window_record_window_id"), "window_record", ["window_id"], unique=False)
    op.create_table(
        "deployment_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("from_id", sa.Integer(), nullable=True),
        sa.Column("to_id", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("kind IN ('init', 'promote', 'rollback')", name=op.f("ck_deployment_event_kind")),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_deployment_event_drafter_id")),
        sa.ForeignKeyConstraint(
            ["from_id"], ["drafter_version.id"], name=op.f("fk_deployment_event_from_id")
        ),
        sa.ForeignKeyConstraint(["to_id"], ["drafter_version.id"], name=op.f("fk_deployment_event_to_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deployment_event")),
        sa.UniqueConstraint(
            "drafter_id", "generation", name=op.f("uq_deployment_event_drafter_id_generation")
        ),
    )
    op.create_table(
        "evaluation",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("candidate_id", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.Integer(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("requests", sa.Integer(), nullable=False),
        sa.Column("scores", sa.JSON(), nullable=False),
        sa.Column("overall", sa.JSON(), nullable=False),
        sa.Column("promote", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["candidate_id"], ["drafter_version.id"], name=op.f("fk_evaluation_candidate_id")
        ),
        sa.ForeignKeyConstraint(["parent_id"], ["drafter_version.id"], name=op.f("fk_evaluation_parent_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluation")),
        sa.UniqueConstraint("candidate_id", name=op.f("uq_evaluation_candidate_id")),
    )
    op.create_table(
        "live_interval",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("version_id", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_live_interval_drafter_id")),
        sa.ForeignKeyConstraint(
            ["version_id"], ["drafter_version.id"], name=op.f("fk_live_interval_version_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_live_interval")),
        sa.UniqueConstraint("drafter_id", "generation", name=op.f("uq_live_interval_drafter_id_generation")),
    )
    op.create_index(
        "uq_live_interval_open",
        "live_interval",
        ["drafter_id"],
        unique=True,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_table(
        "pointer",
        sa.Column("drafter_id", sa.Integer(), nullable=False),
        sa.Column("live_id", sa.Integer(), nullable=False),
        sa.Column("previous_id", sa.Integer(), nullable=True),
        sa.Column("canary_id", sa.Integer(), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["drafter_id", "canary_id"],
            ["drafter_version.drafter_id", "drafter_version.id"],
            name=op.f("fk_pointer_drafter_id_canary_id"),
        ),
        sa.ForeignKeyConstraint(
            ["drafter_id", "live_id"],
            ["drafter_version.drafter_id", "drafter_version.id"],
            name=op.f("fk_pointer_drafter_id_live_id"),
        ),
        sa.ForeignKeyConstraint(
            ["drafter_id", "previous_id"],
            ["drafter_version.drafter_id", "drafter_version.id"],
            name=op.f("fk_pointer_drafter_id_previous_id"),
        ),
        sa.ForeignKeyConstraint(["drafter_id"], ["drafter.id"], name=op.f("fk_pointer_drafter_id")),
        sa.PrimaryKeyConstraint("drafter_id", name=op.f("pk_pointer")),
    )
    op.create_table(
        "training_run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("parent_id", sa.Integer(), nullable=False),
        sa.Column("window_id", sa.Integer(), nullable=False),
        sa.Column("version_id", sa.Integer(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("records", sa.Integer(), nullable=False),
        sa.Column("positions", sa.Integer(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("first_loss", sa.Double(), nullable=True),
        sa.Column("last_loss", sa.Double(), nullable=True),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("outcome", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("outcome IN ('trained', 'failed')", name=op.f("ck_training_run_outcome")),
        sa.ForeignKeyConstraint(
            ["parent_id"], ["drafter_version.id"], name=op.f("fk_training_run_parent_id")
        ),
        sa.ForeignKeyConstraint(
            ["version_id"], ["drafter_version.id"], name=op.f("fk_training_run_version_id")
        ),
        sa.ForeignKeyConstraint(
            ["window_id"], ["feedback_window.id"], name=op.f("fk_training_run_window_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_training_run")),
        sa.UniqueConstraint("version_id", name=op.f("uq_training_run_version_id")),
    )
    op.create_index(op.f("ix_training_run_parent_id"), "training_run", ["parent_id"], unique=False)


def downgrade() -> None:
    op.drop_table("training_run")
    op.drop_table("pointer")
    op.drop_table("live_interval")
    op.drop_table("evaluation")
    op.drop_table("deployment_event")
    op.drop_table("window_record")
    op.drop_table("drafter_version")
    op.drop_table("feedback_window")
    op.drop_table("server")
    op.drop_table("outbox")
    op.drop_table("job")
    op.drop_table("folded_record")
    op.drop_table("drafter")
    op.drop_table("audit_log")
    op.drop_table("api_key")
    op.drop_table("acceptance_window")
