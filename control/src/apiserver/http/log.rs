//! `pods/log`: the lines of a container, from the node that runs it.

use std::sync::Arc;

use axum::body::Body;
use http::{HeaderValue, Response, header};
use jiff::Timestamp;
use serde_json::Value;
use tokio_stream::wrappers::ReceiverStream;

use super::call::Call;
use super::respond::Answer;
use super::route::Query;
use crate::apiserver::api::Api;
use crate::apiserver::logs::LogQuery;
use crate::apiserver::object::{self, text};
use crate::status::ApiError;

pub(super) async fn log(api: &Arc<Api>, call: Call) -> Answer {
    let def = api.resource("", "v1", "pods")?;
    let pod = api.get(&def, &call.path.namespace, &call.path.name).await?;
    let query = log_query(&pod, &call.query, Timestamp::now())?;
    let Some(logs) = api.node_logs() else {
        return Err(ApiError::new(
            503,
            "ServiceUnavailable",
            "logs are not available: this server is not connected to nodes",
        ));
    };
    let chunks = logs.logs(query).await?;
    let mut response = Response::new(Body::from_stream(ReceiverStream::new(chunks)));
    let plain = HeaderValue::from_static("text/plain");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    Ok(response)
}

fn container_names(pod: &Value) -> impl Iterator<Item = &str> {
    ["initContainers", "containers", "ephemeralContainers"]
        .into_iter()
        .filter_map(|list| pod["spec"][list].as_array())
        .flatten()
        .map(|c| text(c, "/name"))
}

fn log_query(pod: &Value, query: &Query, now: Timestamp) -> Result<LogQuery, ApiError> {
    let name = object::name(pod);
    let container = match query.get("container") {
        Some(wanted) => {
            if !container_names(pod).any(|c| c == wanted) {
                let why = format!("container {wanted} is not valid for pod {name}");
                return Err(ApiError::bad_request(why));
            }
            wanted.to_owned()
        }
        None => {
            let containers = pod["spec"]["containers"]
                .as_array()
                .map_or(&[][..], Vec::as_slice);
            match containers {
                [only] => text(only, "/name").to_owned(),
                many => {
                    let names: Vec<&str> = many.iter().map(|c| text(c, "/name")).collect();
                    let why = format!(
                        "a container name must be specified for pod {name}, choose one of: [{}]",
                        names.join(" ")
                    );
                    return Err(ApiError::bad_request(why));
                }
            }
        }
    };
    let node = text(pod, "/spec/nodeName");
    if node.is_empty() {
        let why = format!("pod {name} does not have a host assigned");
        return Err(ApiError::bad_request(why));
    }
    Ok(LogQuery {
        node: node.into(),
        namespace: object::namespace(pod).into(),
        pod: name.into(),
        pod_uid: text(pod, "/metadata/uid").into(),
        container,
        follow: query.flag("follow"),
        previous: query.flag("previous"),
        timestamps: query.flag("timestamps"),
        tail_lines: positive(query, "tailLines")?,
        limit_bytes: positive(query, "limitBytes")?,
        since_us: since(query, now)?,
    })
}

fn positive(query: &Query, key: &str) -> Result<Option<i64>, ApiError> {
    let Some(given) = query.get(key) else {
        return Ok(None);
    };
    match given.parse::<i64>() {
        Ok(number) if number >= 0 => Ok(Some(number)),
        _ => Err(ApiError::bad_request(format!(
            "{key}={given:?} is not a number of 0 or more"
        ))),
    }
}

fn since(query: &Query, now: Timestamp) -> Result<Option<i64>, ApiError> {
    if let Some(seconds) = positive(query, "sinceSeconds")? {
        return Ok(Some(
            now.as_microsecond()
                .saturating_sub(seconds.saturating_mul(1_000_000)),
        ));
    }
    let Some(given) = query.get("sinceTime") else {
        return Ok(None);
    };
    let time: Timestamp = given.parse().map_err(|_| {
        ApiError::bad_request(format!("sinceTime={given:?} is not an RFC 3339 time"))
    })?;
    Ok(Some(time.as_microsecond()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_of_two_containers_needs_a_name() {
        let pod = json!({"metadata": {"name": "p", "namespace": "ns", "uid": "u"},
            "spec": {"nodeName": "n1", "containers": [{"name": "a"}, {"name": "b"}]}});
        let of = |q: &str| log_query(&pod, &Query::parse(Some(q)), Timestamp::UNIX_EPOCH);
        assert!(of("").unwrap_err().message.contains("choose one of: [a b]"));
        assert_eq!(of("container=c").unwrap_err().code, 400);
        let query = of("container=b&follow=true&tailLines=3").unwrap();
        assert_eq!(
            (&*query.container, query.follow, query.tail_lines),
            ("b", true, Some(3))
        );
        assert_eq!(of("container=b&tailLines=-1").unwrap_err().code, 400);
    }
}
