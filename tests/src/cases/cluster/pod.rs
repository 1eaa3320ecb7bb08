//! Pods of a case: wired by the CNI plugin, played by actors.

use std::net::IpAddr;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::handle::Handle;
use super::node::Node;
use super::slices::PodView;
use super::spec::PodSpec;
use super::{Cluster, listen};
use crate::topology::Namespace;

const CNI_WITHIN: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(in crate::cases) struct Pod {
    pub(in crate::cases) spec: PodSpec,
    pub(in crate::cases) ips: Vec<IpAddr>,
    /// None for pods on the node's network.
    pub(in crate::cases) namespace: Option<Namespace>,
    pub(in crate::cases) actor: Handle,
    container_id: String,
    /// Its node left: the object is gone, the process may be running still.
    pub(in crate::cases) lost: bool,
}

impl Cluster {
    /// A new pod: wired by the plugin, its servers listening, its object written.
    ///
    /// # Errors
    /// What the plugin said.
    pub(in crate::cases) fn create_pod(&mut self, spec: &PodSpec) -> Result<()> {
        self.next_container += 1;
        let container_id = format!("{:0>12}{:x}", self.next_container, std::process::id());
        let node = self
            .nodes
            .get(&spec.node)
            .with_context(|| format!("no node {}", spec.node))?;
        // As in a cluster: the API knows of the pod, then it is wired, then its addresses are told.
        let mut object = spec.object();
        let written = self.control.objects.put("pods", object.clone());
        let uid = written["metadata"]["uid"].as_str().unwrap_or_default();
        let (namespace, home) = if spec.host_network {
            (None, &node.namespace)
        } else {
            let own = Namespace::new(&format!("p-{}", spec.name))?;
            (Some(own), &node.namespace)
        };
        let actor = Handle::start(namespace.as_ref().unwrap_or(home), &self.actor_log())?;
        self.admit(&actor)?;
        // Before it can be reached: what does not answer then is not let in.
        listen(&actor, &spec.listen, &spec.key())?;
        let ips = match &namespace {
            Some(own) => self.cni(node, ("ADD", uid), &container_id, Some(own), spec)?,
            None => node.ips.clone(),
        };
        spec.wired(&mut object, &ips);
        self.control.objects.put("pods", object);
        let pod = Pod {
            spec: spec.clone(),
            ips,
            namespace,
            actor,
            container_id,
            lost: false,
        };
        self.pods.insert(spec.key(), pod);
        Ok(())
    }

    /// The pod's object goes, its wire is cut, then CNI DEL.
    ///
    /// # Errors
    /// What the plugin said.
    pub(in crate::cases) fn remove_pod(&mut self, key: &str) -> Result<()> {
        let pod = self
            .pods
            .remove(key)
            .with_context(|| format!("no pod {key}"))?;
        self.gone.insert(key.to_owned(), pod.ips.clone());
        let (namespace, name) = (&pod.spec.namespace, &pod.spec.name);
        self.control.objects.remove("pods", namespace, name);
        self.unwire(&pod)
    }

    /// The wire of a pod whose object is somebody else's concern goes.
    ///
    /// # Errors
    /// What the plugin said.
    pub(in crate::cases) fn unwire(&self, pod: &Pod) -> Result<()> {
        let Some(namespace) = &pod.namespace else {
            return Ok(());
        };
        if pod.lost {
            return Ok(());
        }
        namespace.ip(&["link", "set", "eth0", "down"])?;
        let node = self.nodes.get(&pod.spec.node).context("the pod's node")?;
        self.cni(
            node,
            ("DEL", ""),
            &pod.container_id,
            Some(namespace),
            &pod.spec,
        )?;
        Ok(())
    }

    /// Asks the plugin whether the agent behind it can wire pods.
    pub(super) fn cni_status(&self, node: &Node) -> Result<()> {
        let nobody = PodSpec::default();
        self.cni(node, ("STATUS", ""), "", None, &nobody).map(drop)
    }

    fn cni(
        &self,
        node: &Node,
        (verb, uid): (&str, &str),
        container: &str,
        namespace: Option<&Namespace>,
        spec: &PodSpec,
    ) -> Result<Vec<IpAddr>> {
        let mappings: Vec<Value> = spec
            .host_ports
            .iter()
            .map(|h| json!({"hostPort": h.host_port, "containerPort": h.port, "protocol": h.protocol.name().to_lowercase(), "hostIP": h.host_ip}))
            .collect();
        let config = json!({
            "cniVersion": "1.1.0", "name": "weir", "type": "weir-cni",
            "socket": node.folder.join("run/cni.sock"), "stateDir": node.folder.join("state"),
            "capabilities": {"portMappings": true, "ips": true},
            "runtimeConfig": {"portMappings": mappings, "ips": spec.wanted_ips},
        });
        let mut command = std::process::Command::new("timeout");
        command
            .arg(CNI_WITHIN.as_secs().to_string())
            .arg(&self.binaries.cni)
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .env(
                "CNI_ARGS",
                format!(
                    "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_UID={uid}",
                    spec.namespace, spec.name
                ),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(namespace) = namespace {
            command.env("CNI_NETNS", namespace.path());
        }
        let mut child = command.spawn().context("run weir-cni")?;
        if let Some(mut stdin) = child.stdin.take() {
            std::io::Write::write_all(&mut stdin, config.to_string().as_bytes())?;
        }
        let output = child.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success(),
            "CNI {verb} for {}: {said}{}",
            spec.name,
            String::from_utf8_lossy(&output.stderr)
        );
        if verb != "ADD" {
            return Ok(Vec::new());
        }
        let result: Value =
            serde_json::from_str(&said).with_context(|| format!("CNI result {said}"))?;
        let addresses = result["ips"].as_array().into_iter().flatten();
        let bare = |ip: &Value| {
            ip["address"]
                .as_str()
                .and_then(|a| a.split('/').next()?.parse().ok())
        };
        Ok(addresses.filter_map(bare).collect())
    }

    /// Pods as the slices see them.
    #[must_use]
    pub(in crate::cases) fn pod_views(&self) -> Vec<PodView> {
        let view = |pod: &Pod| {
            let node = self.nodes.get(&pod.spec.node);
            let zone = node.and_then(|n| n.spec.zone.as_deref());
            PodView::new(&pod.spec, &pod.ips, zone)
        };
        let has_object = |pod: &&Pod| !pod.lost;
        self.pods.values().filter(has_object).map(view).collect()
    }
}
