//! `weir-agent cleanup`: everything the agent made on this node, removed and counted.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use weir_agent::cni_api::{self, conf};
use weir_agent::config::Config;
use weir_agent::feed;
use weir_agent::kernel::Kernel;
use weir_agent::netlink::changed_sysctls::ChangedSysctls;
use weir_agent::netlink::{
    HOST_LINK, HOST_LINK_PEER, Netlink, OVERLAY_LINK, PARK_LINK, PARK_LINK_PEER, base, overlay,
    reserved_ports, sync,
};
use weir_agent::policy;

/// Removes and returns what was removed, one line each. Running it again finds nothing.
pub(crate) fn run(config: &Config) -> Result<Vec<String>> {
    let _lock = if config.run_dir.exists() {
        Some(super::lock(&config.run_dir)?)
    } else {
        None
    };
    let mut removed = Vec::new();
    let mut netlink = Netlink::open()?;
    if let Some(conf_dir) = &config.cni.conf_dir
        && conf::remove(conf_dir)?
    {
        removed.push(format!("file {}", conf_dir.join(conf::CONF_NAME).display()));
    }
    for link in netlink.links()? {
        if link.veth && cni_api::is_pod_link(&link.name) {
            netlink.delete_link(&link.name)?;
            removed.push(format!("pod link {}", link.name));
        }
    }
    let routes = sync::remove_all(&mut netlink)?;
    if routes > 0 {
        removed.push(format!("{routes} routes"));
    }
    if reserved_ports::release(&config.state_dir)? {
        removed.push("reservation of the node port range".into());
    }
    if base::remove_pair(&mut netlink, HOST_LINK)? {
        removed.push(format!("host link {HOST_LINK}"));
    }
    if overlay::remove(&mut netlink)? {
        removed.push(format!("overlay link {OVERLAY_LINK}"));
    }
    if base::remove_pair(&mut netlink, PARK_LINK)? {
        removed.push(format!("fragment link {PARK_LINK}"));
    }
    for pin in Kernel::cleanup(&config.bpffs)? {
        removed.push(format!("pin {}", pin.display()));
    }
    // After the links of ours, whose sysctls go with them.
    let restored = ChangedSysctls::of(&config.state_dir).restore()?;
    removed.extend(restored.into_iter().map(|line| format!("sysctl: {line}")));
    for name in cni_api::STATE_NAMES.iter().chain(&[
        feed::STATE_NAME,
        policy::IDENTITIES_NAME,
        policy::DOMAINS_NAME,
    ]) {
        remove_path(&config.state_dir.join(name), &mut removed)?;
    }
    remove_path(&config.cni_socket(), &mut removed)?;
    remove_path(
        &config.run_dir.join(super::apply::APPLIED_MARK),
        &mut removed,
    )?;
    // Not counted: this very run made it again.
    remove_path(&config.run_dir.join(super::LOCK_NAME), &mut Vec::new())?;
    verify(&mut netlink, config)?;
    Ok(removed)
}

fn remove_path(path: &Path, removed: &mut Vec<String>) -> Result<()> {
    let result = match std::fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(meta) if meta.is_dir() => std::fs::remove_dir_all(path),
        Ok(_) => std::fs::remove_file(path),
    };
    result.with_context(|| format!("remove {}", path.display()))?;
    removed.push(format!("file {}", path.display()));
    Ok(())
}

/// Looks for what must be gone, by other ways than it was removed by.
fn verify(netlink: &mut Netlink, config: &Config) -> Result<()> {
    let routes = netlink.own_routes()?;
    if let Some(route) = routes.first() {
        bail!(
            "{} routes are left, for example {}",
            routes.len(),
            route.destination
        );
    }
    const LINKS: [&str; 5] = [
        HOST_LINK,
        HOST_LINK_PEER,
        OVERLAY_LINK,
        PARK_LINK,
        PARK_LINK_PEER,
    ];
    let left = netlink
        .links()?
        .into_iter()
        .find(|l| (l.veth && cni_api::is_pod_link(&l.name)) || LINKS.contains(&l.name.as_str()));
    if let Some(link) = left {
        bail!("link {} is left", link.name);
    }
    if let Some(pin) = Kernel::cleanup(&config.bpffs)?.first() {
        bail!(
            "{} came back; is another agent running on this node?",
            pin.display()
        );
    }
    for name in cni_api::STATE_NAMES {
        let path = config.state_dir.join(name);
        if path.exists() {
            bail!("{} is left", path.display());
        }
    }
    Ok(())
}
