//! Reports to the control plane: node, pods, events. Unary calls on the connection that the follower keeps.

use std::time::Duration;

use control_api::v1::node_feed_client::NodeFeedClient;
use control_api::v1::{
    EventReport, EventReports, NodeReport, NodeReportReply, PodReports, PodStatus,
};
use tonic::transport::Channel;

use super::FeedHandle;

/// How long a report may take, connection included.
const REPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// A report did not arrive. Reports carry whole states: send the current one again later.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("report {what}: no feed server could be reached within {seconds} s")]
    NotConnected { what: &'static str, seconds: u64 },
    #[error("report {what}: no answer within {seconds} s")]
    Timeout { what: &'static str, seconds: u64 },
    #[error("report {what}: the control plane answered {code:?}: {message}")]
    Refused {
        what: &'static str,
        code: tonic::Code,
        message: String,
    },
}

impl FeedHandle {
    /// Registers this node, refreshes its status (when `full`) and renews its Lease.
    ///
    /// # Errors
    /// [`ReportError`]; report again at the next period.
    pub async fn report_node(&self, report: NodeReport) -> Result<NodeReportReply, ReportError> {
        self.call("node", async |mut client| client.report_node(report).await)
            .await
    }

    /// Reports pod statuses; each is the whole status of its pod.
    ///
    /// # Errors
    /// [`ReportError`]; report the then current statuses again.
    pub async fn report_pods(&self, pods: Vec<PodStatus>) -> Result<(), ReportError> {
        let reports = PodReports {
            node_name: self.shared.node_name.clone(),
            pods,
        };
        self.call("pods", async |mut client| client.report_pods(reports).await)
            .await?;
        Ok(())
    }

    /// Records events on objects of this node (best effort).
    ///
    /// # Errors
    /// [`ReportError`]; events may be dropped.
    pub async fn report_events(&self, events: Vec<EventReport>) -> Result<(), ReportError> {
        let reports = EventReports {
            node_name: self.shared.node_name.clone(),
            events,
        };
        self.call("events", async |mut client| {
            client.report_events(reports).await
        })
        .await?;
        Ok(())
    }

    async fn call<T>(
        &self,
        what: &'static str,
        run: impl AsyncFnOnce(NodeFeedClient<Channel>) -> Result<tonic::Response<T>, tonic::Status>,
    ) -> Result<T, ReportError> {
        let seconds = REPORT_TIMEOUT.as_secs();
        let deadline = tokio::time::Instant::now() + REPORT_TIMEOUT;
        let mut channels = self.shared.channel.subscribe();
        let channel =
            match tokio::time::timeout_at(deadline, channels.wait_for(Option::is_some)).await {
                Ok(Ok(channel)) => channel.clone(),
                _ => None,
            };
        let Some(channel) = channel else {
            return Err(ReportError::NotConnected { what, seconds });
        };
        match tokio::time::timeout_at(deadline, run(NodeFeedClient::new(channel))).await {
            Err(_) => Err(ReportError::Timeout { what, seconds }),
            Ok(Err(status)) => Err(ReportError::Refused {
                what,
                code: status.code(),
                message: status.message().to_owned(),
            }),
            Ok(Ok(reply)) => Ok(reply.into_inner()),
        }
    }
}
