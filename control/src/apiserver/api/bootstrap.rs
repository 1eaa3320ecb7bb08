//! Objects that the cluster cannot do without, made at every start when they are missing, and again when they go.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{Api, Target, Warnings, WriteOptions};
use crate::apiserver::codec::FieldValidation;
use crate::config::nth_address;
use crate::status::ApiError;

/// Claims are compared with all Services every so many repeats.
const REPAIR_ROUNDS: u32 = 200;
const NAMESPACES: [&str; 4] = ["default", "kube-system", "kube-public", "kube-node-lease"];
const MANAGER: &str = "weir-control";
const PRIORITY_CLASSES: [(&str, i64, &str); 2] = [
    (
        "system-cluster-critical",
        2_000_000_000,
        "Used for system critical pods that must run in the cluster, but can be moved to another node if necessary.",
    ),
    (
        "system-node-critical",
        2_000_001_000,
        "Used for system critical pods that must not be moved from their current node.",
    ),
];

impl Api {
    /// Makes the system namespaces, the Services `kubernetes` (with its endpoints) and `kube-dns`, the service ranges and
    /// the system priority classes.
    ///
    /// # Errors
    /// The first object that can neither be made nor found, by name.
    pub async fn bootstrap(&self, advertise: SocketAddr) -> Result<(), ApiError> {
        for name in NAMESPACES {
            let namespace =
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            self.ensure(("", "namespaces"), "", namespace).await?;
        }
        for (name, value, description) in PRIORITY_CLASSES {
            let class = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
                "metadata": {"name": name}, "value": value, "description": description});
            self.ensure(("scheduling.k8s.io", "priorityclasses"), "", class)
                .await?;
        }
        let cidrs: Vec<String> = self
            .network
            .service_cidrs
            .iter()
            .map(ToString::to_string)
            .collect();
        let range = json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR",
            "metadata": {"name": "kubernetes"}, "spec": {"cidrs": cidrs}});
        self.ensure(("networking.k8s.io", "servicecidrs"), "", range)
            .await?;
        let ports = json!([{"name": "https", "port": 443, "protocol": "TCP", "targetPort": advertise.port()}]);
        let first = self
            .network
            .service_cidrs
            .iter()
            .filter_map(|c| nth_address(*c, 1))
            // A family without an endpoint would refuse the clients that try it first.
            .filter(|ip| ip.is_ipv4() == advertise.is_ipv4())
            .collect();
        let labels = json!({"component": "apiserver", "provider": "kubernetes"});
        let service = service("default", "kubernetes", labels, ports, first);
        self.ensure(("", "services"), "default", service).await?;
        let ports = json!([
            {"name": "dns", "port": 53, "protocol": "UDP", "targetPort": 53},
            {"name": "dns-tcp", "port": 53, "protocol": "TCP", "targetPort": 53},
        ]);
        let labels = json!({"k8s-app": "kube-dns", "kubernetes.io/cluster-service": "true",
            "kubernetes.io/name": "CoreDNS"});
        let dns = service_of_dns(labels, ports, self.network.cluster_dns());
        self.ensure(("", "services"), "kube-system", dns).await?;
        self.publish_endpoints(advertise).await
    }

    /// Makes missing system objects again, once per period, until shutdown, and repairs what Services hold.
    pub async fn keep_bootstrapped(
        self: Arc<Self>,
        advertise: SocketAddr,
        period: Duration,
        shutdown: CancellationToken,
    ) {
        let mut failing = false;
        for round in 1_u32.. {
            tokio::select! {
                () = tokio::time::sleep(period) => {}
                () = shutdown.cancelled() => return,
            }
            let mut done = self.bootstrap(advertise).await;
            if done.is_ok() && round % REPAIR_ROUNDS == 0 {
                done = self.repair_services().await.map(|_| ());
            }
            match done {
                Ok(()) => failing = false,
                Err(error) if !failing => {
                    failing = true;
                    tracing::warn!(%error, "make the system objects; trying again");
                }
                Err(_) => {}
            }
        }
    }

    async fn ensure(
        &self,
        (group, plural): (&str, &str),
        namespace: &str,
        object: Value,
    ) -> Result<(), ApiError> {
        let def = self.resource(group, "v1", plural)?;
        // Looked up first: a Service of before holds the address that a second one would ask for.
        let name = crate::apiserver::object::name(&object).to_owned();
        if self.get(&def, namespace, &name).await.is_ok() {
            return Ok(());
        }
        match self.create(&def, namespace, object, &options()).await {
            Err(e) if e.is_already_exists() => Ok(()),
            made => made.map(|_| ()),
        }
    }

    /// Endpoints and EndpointSlice of the `kubernetes` Service always show the address that is configured now.
    async fn publish_endpoints(&self, advertise: SocketAddr) -> Result<(), ApiError> {
        let port = json!([{"name": "https", "port": advertise.port(), "protocol": "TCP"}]);
        let ip = advertise.ip().to_string();
        let endpoints = json!({"apiVersion": "v1", "kind": "Endpoints",
            "metadata": {"name": "kubernetes", "namespace": "default",
                "labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}},
            "subsets": [{"addresses": [{"ip": ip}], "ports": port}]});
        self.replace(("", "endpoints"), "default", endpoints)
            .await?;
        let family = if advertise.is_ipv4() { "IPv4" } else { "IPv6" };
        let slice = json!({"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": "kubernetes", "namespace": "default",
                "labels": {"kubernetes.io/service-name": "kubernetes"}},
            "addressType": family, "ports": port,
            "endpoints": [{"addresses": [ip], "conditions": {"ready": true, "serving": true, "terminating": false}}]});
        match self
            .replace(
                ("discovery.k8s.io", "endpointslices"),
                "default",
                slice.clone(),
            )
            .await
        {
            // The address family of a slice cannot change.
            Err(e) if e.code == 422 => {
                let def = self.resource("discovery.k8s.io", "v1", "endpointslices")?;
                let at_once = super::DeleteRequest::default();
                self.delete(&def, "default", "kubernetes", &at_once).await?;
                self.create(&def, "default", slice, &options())
                    .await
                    .map(|_| ())
            }
            replaced => replaced,
        }
    }

    async fn replace(
        &self,
        (group, plural): (&str, &str),
        namespace: &str,
        object: Value,
    ) -> Result<(), ApiError> {
        let def = self.resource(group, "v1", plural)?;
        match self
            .create(&def, namespace, object.clone(), &options())
            .await
        {
            Err(e) if e.is_already_exists() => {
                let name = crate::apiserver::object::name(&object).to_owned();
                let target = Target {
                    def: &def,
                    namespace,
                    name: &name,
                    sub: None,
                };
                self.update(target, object, &options()).await.map(|_| ())
            }
            made => made.map(|_| ()),
        }
    }
}

fn options() -> WriteOptions {
    WriteOptions {
        dry_run: false,
        manager: MANAGER.into(),
        validation: FieldValidation::Strict,
        warnings: Warnings::default(),
    }
}

fn service_of_dns(labels: Value, ports: Value, ips: Vec<IpAddr>) -> Value {
    service("kube-system", "kube-dns", labels, ports, ips)
}

fn service(namespace: &str, name: &str, labels: Value, ports: Value, ips: Vec<IpAddr>) -> Value {
    let ips: Vec<String> = ips.iter().map(ToString::to_string).collect();
    let policy = if ips.len() > 1 {
        "PreferDualStack"
    } else {
        "SingleStack"
    };
    json!({"apiVersion": "v1", "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"clusterIP": ips.first(), "clusterIPs": ips, "ipFamilyPolicy": policy, "ports": ports}})
}
