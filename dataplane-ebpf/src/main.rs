#![no_std]
#![no_main]
use aya_ebpf::{macros::classifier, programs::TcContext};
#[classifier]
pub fn from_pod(_ctx: TcContext) -> i32 { 0 }
#[cfg(not(test))]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! { loop {} }
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
